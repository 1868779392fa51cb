"""Which versions of the Hub's client can be used."""

from __future__ import annotations

from ckpt.errors import ConfigError


def require_client() -> None:
    """Refuse a client before 1.0: its answers cannot be checked as they come in. Only what uses the Hub needs it."""
    import huggingface_hub

    version = huggingface_hub.__version__
    if version.startswith("0."):
        raise ConfigError(
            f"the Hub needs huggingface_hub 1.0 or newer, and {version} is installed: transformers 4 allows no newer "
            "one. Install transformers 5; or use another storage, and push from another environment."
        )
