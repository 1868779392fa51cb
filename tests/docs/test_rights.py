"""The rights that the guide to S3 asks for are those of the requests that are made."""

from __future__ import annotations

import json
import re

from tests.docs.pages import DOCS, ROOT, page

GUIDE = (DOCS / "guides/s3.md").read_text()
REQUEST = re.compile(r'"((?:\w+_)*(?:object|objects|objects_v2|upload|uploads|part|parts|part_copy|bucket))"')
ROW = re.compile(r"^\| `(s3:\w+)` \| (.+?) \| (.+?) \|", re.MULTILINE)


def test_every_request_to_s3_has_its_right_in_the_guide() -> None:
    code = (ROOT / "storage/clouds/s3.py").read_text()
    requests = {name for name in REQUEST.findall(code) if "_" in name}
    assert {"put_object", "list_objects_v2", "upload_part_copy"} <= requests
    listed = set(re.findall(r"`(\w+)`", " ".join(purpose for _, _, purpose in ROW.findall(GUIDE))))
    assert listed == requests


def test_the_policy_of_the_guide_gives_the_rights_of_its_table() -> None:
    (policy,) = (block.code for block in page("guides/s3.md") if block.title == "policy.json")
    on_bucket, on_objects = json.loads(policy)["Statement"]
    rows = ROW.findall(GUIDE)
    assert sorted(on_bucket["Action"]) == sorted(right for right, where, _ in rows if where == "the bucket")
    assert sorted(on_objects["Action"]) == sorted(right for right, where, _ in rows if where == "its objects")
