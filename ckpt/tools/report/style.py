"""The style sheet of the report: light and dark, phone and print. Nothing in it is loaded from elsewhere."""

from __future__ import annotations

_LIGHT = """
--page:#f5f6f8;--surface:#ffffff;--ink:#1b2230;--muted:#5a6473;--grid:#e2e6eb;
--line:#2a5fae;--second:#b4490f;--third:#79b39c;--bad:#b3261e;--good:#1d7047;
--heat-0:#e3ecf8;--heat-1:#c9dbf1;--heat-2:#aac6e8;--heat-3:#87addd;
--heat-4:#6491cd;--heat-5:#4374b7;--heat-6:#2a589a;--heat-7:#153a70;
"""
_DARK = """
--page:#11141a;--surface:#191e26;--ink:#e5e8ed;--muted:#9ca6b4;--grid:#2d3540;
--line:#79a8ee;--second:#ef9a5b;--third:#3d8069;--bad:#ff9089;--good:#72cc9b;
--heat-0:#1f2d44;--heat-1:#27405f;--heat-2:#31547e;--heat-3:#3e6a9f;
--heat-4:#5283c0;--heat-5:#6f9fda;--heat-6:#94bdef;--heat-7:#c6defd;
"""

STYLE = f"""
:root{{color-scheme:light dark;{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root{{{_DARK}}}}}
@media print{{:root{{color-scheme:light;{_LIGHT}--page:#ffffff}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
-webkit-text-size-adjust:100%}}
main{{max-width:66rem;margin:0 auto;padding:1.5rem 1rem 3rem}}
h1{{font-size:1.5rem;line-height:1.25;margin:0;overflow-wrap:anywhere}}
h2{{font-size:1.1rem;margin:0 0 .25rem}}
h3{{font-size:.95rem;margin:1.1rem 0 .25rem}}
p{{margin:.25rem 0 .75rem}}
.muted{{color:var(--muted)}}
.where{{color:var(--muted);overflow-wrap:anywhere;margin:.2rem 0 1.25rem}}
section{{background:var(--surface);border:1px solid var(--grid);border-radius:10px;padding:1rem 1.1rem;margin:1rem 0}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.6rem,1fr));gap:.75rem}}
.tile{{margin:0;background:var(--surface);border:1px solid var(--grid);border-radius:10px;padding:.7rem .9rem}}
.tile dt{{color:var(--muted);font-size:.82rem}}
.tile dd{{margin:0;font-size:1.3rem;font-weight:600;line-height:1.3;font-variant-numeric:tabular-nums}}
.tile dd.note{{font-size:.82rem;font-weight:400;color:var(--muted)}}
.box{{overflow-x:auto;max-width:100%}}
.box.tall{{max-height:34rem;overflow-y:auto}}
.box>svg{{display:block}}
.panels{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,19rem),1fr));gap:.75rem}}
.panels svg{{display:block;width:100%;height:auto;max-width:34rem}}
table{{border-collapse:collapse;width:100%;font-size:.88rem}}
th,td{{padding:.38rem .7rem .38rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid)}}
th{{color:var(--muted);font-weight:600;vertical-align:bottom;background:var(--surface);position:sticky;top:0}}
td{{white-space:nowrap;font-variant-numeric:tabular-nums}}
td.long{{white-space:normal;min-width:14rem;overflow-wrap:anywhere}}
.right{{text-align:right}}
.gone td{{color:var(--muted)}}
.good{{color:var(--good);font-weight:600}}
.bad{{color:var(--bad);font-weight:600}}
.best{{color:var(--second);font-weight:600;white-space:nowrap}}
ol,ul{{margin:.4rem 0;padding-left:1.3rem}}
li{{margin:.3rem 0;overflow-wrap:anywhere}}
.legend{{display:flex;flex-wrap:wrap;gap:.35rem 1.1rem;margin:.6rem 0 .8rem;padding:0;list-style:none;
color:var(--muted);font-size:.85rem}}
.legend li{{margin:0;display:flex;align-items:center;gap:.4rem}}
.key{{display:inline-block;width:.85rem;height:.85rem;border-radius:2px;flex:none}}
.ramp{{display:inline-flex;border-radius:2px;overflow:hidden}}
.ramp .key{{border-radius:0;width:1.1rem}}
footer{{color:var(--muted);font-size:.85rem;margin-top:1.5rem}}
@media (max-width:34rem){{main{{padding:1rem .6rem 2rem}}section{{padding:.8rem .7rem}}
.tiles{{grid-template-columns:repeat(2,minmax(0,1fr))}}}}
@media print{{body{{font-size:10pt}}main{{max-width:none;padding:0}}section{{border:none;padding:0;margin:1.2rem 0}}
.box,.box.tall{{overflow:visible;max-height:none}}.box>svg{{max-width:100%;height:auto}}th{{position:static}}
h2,h3,svg,tr,.tile{{break-inside:avoid}}h2,h3{{break-after:avoid}}table{{font-size:7.5pt}}
.tiles{{grid-template-columns:repeat(6,minmax(0,1fr))}}.tile{{padding:.4rem .5rem}}
*{{-webkit-print-color-adjust:exact;print-color-adjust:exact}}}}
"""
