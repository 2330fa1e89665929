"""How pages look beyond what ``theme.toml`` says: denser, and without what disturbs."""

from __future__ import annotations

__all__ = ["STYLE"]

STYLE = """
<style>
.block-container { max-width: 1500px; padding-top: 3.6rem; padding-bottom: 3rem; }
div[data-testid="stVerticalBlock"] { gap: 0.6rem; }
div[data-testid="stMetric"] { padding: 0; }
div[data-testid="stMetricValue"] { font-variant-numeric: tabular-nums; }
[data-testid="stSkeleton"], [data-testid="stSkeleton"] * { animation: none !important; }
#MainMenu, footer, div[data-testid="stDecoration"], [data-testid="stAppDeployButton"] { display: none; }
.stStatusWidget:has([data-testid="stStatusWidgetRunningIcon"]) { display: none; }
@media (max-width: 640px) { .block-container { padding-left: 0.8rem; padding-right: 0.8rem; } }
@media (hover: none) { .js-plotly-plot:not(:hover) .modebar { opacity: 0; pointer-events: none; } }
</style>
"""
