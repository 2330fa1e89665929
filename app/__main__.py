"""Serves the dashboard: ``python -m app --host ADDRESS --port N [--browser]``; ``simplan dashboard`` calls it.

Streamlit loads pages at the first request. The modules that pages import are loaded earlier, while the server starts.
"""

from __future__ import annotations

import argparse
import gc
import os

from app.jobs.job import WORKERS, page_jobs
from app.server import serve


def main() -> None:
    """Serves until it is interrupted."""
    parser = argparse.ArgumentParser(prog="app")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--browser", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault(WORKERS, "2")
    import pandas  # noqa: F401  # not concurrent with plotly, which inspects the half-loaded module

    serve(options.host, options.port, browser=options.browser, then=_warm_up)


def _warm_up() -> None:
    """Imports the modules of the first page and of its figures, and predicts the default scenario."""
    page_jobs().warm()
    from simplan.sim.compiled import load_compiled

    load_compiled()  # every change is predicted here once for the verdict
    import pandas as pd
    import plotly.tools  # noqa: F401
    import pyarrow as pa  # type: ignore[import-untyped]

    import app.components.plans
    import app.components.published  # noqa: F401
    from app.figures.plan import plan_result
    from app.fitting import document_text
    from app.predictions import quick_headline
    from app.result_cache import done
    from app.state import START
    from simplan.scenario import parse_scenario

    pipeline = START | {"plan": {"tp": 8, "pp": 2, "dp_shard": 4}}
    for document in (START, pipeline):
        quick_headline(parse_scenario(document_text(document)))
    done(plan_result, document_text(START), 0)
    frame = pd.DataFrame({"step": [1.0]})  # load the modules that convert tables for browsers
    pa.Table.from_pandas(frame)
    frame.style.format("{:.2f}").to_html()
    gc.collect()
    gc.freeze()  # Streamlit collects garbage after every run of a page: exclude permanent objects


if __name__ == "__main__":
    main()
