"""The look of the report: one style sheet for light and dark, on screens and paper. Used by the report."""

from __future__ import annotations

__all__ = ["STYLE"]

_LIGHT = ("#1f6fd6", "#d9730d", "#1a8f5c", "#8250c4", "#c93a4a", "#0e8a9c", "#8a6a3b", "#a3a9b3")
_DARK = ("#62a3f5", "#f0a04b", "#4cc38a", "#b48cf0", "#f0717f", "#4cc0d0", "#c9a36b", "#6b7480")
"""Eight colours that also people who see few colours tell apart, each readable on its ground; the last is grey."""


def _variables(colours: tuple[str, ...]) -> str:
    return "".join(f"--c{index}:{colour};" for index, colour in enumerate(colours))


_CLASSES = "".join(f".c{i}{{stroke:var(--c{i});fill:var(--c{i})}}.f{i}{{--f:var(--c{i})}}" for i in range(len(_LIGHT)))

STYLE = f"""
:root{{color-scheme:light dark;--ground:#f6f7f9;--card:#fff;--ink:#1b1f24;--soft:#5b6470;--grid:#e4e7eb;
{_variables(_LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{--ground:#14171b;--card:#1d2126;--ink:#e8eaed;--soft:#9aa4b0;--grid:#30363d;
{_variables(_DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}}
main{{max-width:1280px;margin:0 auto;padding:28px 20px 60px}}
h1{{font-size:26px;margin:0 0 2px}}
h2{{font-size:18px;margin:34px 0 12px}}
.lead{{color:var(--soft);margin:0 0 20px}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;padding:0;margin:0;
list-style:none}}
.tiles li,figure,.table{{background:var(--card);border:1px solid var(--grid);border-radius:10px}}
.tiles li{{padding:12px 16px}}
.tiles b{{display:block;font-size:24px;font-weight:600;font-variant-numeric:tabular-nums}}
.tiles span{{color:var(--soft);font-size:13px}}
.charts{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}}
figure{{margin:0;padding:14px 16px 10px;min-width:0}}
figcaption{{font-weight:600}}
.legend{{display:flex;flex-wrap:wrap;gap:2px 16px;margin:2px 0 6px;padding:0;list-style:none;font-size:13px;
color:var(--soft)}}
.legend b{{color:var(--ink);font-weight:600;font-variant-numeric:tabular-nums}}
.swatch{{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px;background:var(--f)}}
svg{{display:block;width:100%;height:auto}}
svg text{{font:12px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--soft)}}
svg .tick{{font-variant-numeric:tabular-nums}}
svg .row{{fill:var(--ink)}}
svg .inside{{fill:var(--card);font-weight:600;pointer-events:none}}
.grid{{stroke:var(--grid);stroke-width:1}}
{_CLASSES}
.line{{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}}
.dot{{stroke:none}}
.hint{{stroke:none;opacity:0}}
.hint:hover,.dot:hover{{opacity:1;stroke:var(--ink);stroke-width:1.5}}
.part{{fill:var(--f);stroke:var(--card);stroke-width:1}}
.none{{color:var(--soft)}}
.table{{overflow-x:auto;padding:6px 16px}}
table{{border-collapse:collapse;width:100%;font-size:14px}}
th{{text-align:left;color:var(--soft);font-weight:500}}
th,td{{padding:6px 14px 6px 0;border-bottom:1px solid var(--grid);vertical-align:top}}
tr:last-child>*{{border-bottom:0}}
td.number,th.number{{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}}
footer{{margin-top:30px;color:var(--soft);font-size:13px}}
@media print{{body{{background:none}}figure,.table,.tiles li{{break-inside:avoid}}}}
"""
