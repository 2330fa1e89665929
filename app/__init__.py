"""The dashboard: web pages that show simplan's predictions. ``simplan dashboard`` starts it.

Every page is a file in ``app/views`` (a folder ``pages`` means something else to Streamlit);
``app/main.py`` lists them. A page is one function, run by ``run_page``::

    from app.page import run_page


    def show() -> None:
        document = state.document()
        scenario = result_cache.scenario(document)  # raises SpecError: run_page shows the error
        inputs = result_cache.worker_inputs(document)
        result = awaited("predicting the step", plan_result, *inputs)  # computed in another process, cached
        show_figure(memory_figure(...), "memory by rank", alt="...")


    if __name__ == "__main__":
        run_page(show)

Modules:

- ``app/state.py``: state of a session. There is one *document*, the scenario as plain data (its YAML
  file), and *view values*, small settings such as pinned scenarios. Both last for the session and are part of the
  page's address. ``app/fields.py`` binds widgets to both. A link contains nothing else: opening a link shows pages and
  starts nothing.
- ``app/last_read.py``: what the session read last, of a pasted text or a file; the global batch of a file that follows
  from its devices.
- ``app/predictions.py``: scenario -> prediction and its key numbers, computed in worker processes, which ``app/jobs``
  runs. ``app/result_cache.py`` awaits them, and caches them by the scenario's text for all sessions.
- ``app/figures``: for each subject its data, and figures as functions of that data, without Streamlit. ``style.py`` has
  the colors. Figures define no colors of text and background: ``show_figure`` leaves them to the light or dark theme.
- ``app/components``: parts that pages share: metrics, tables, figures with downloads, the scenario form. Numbers show
  their definitions, from simplan itself, as help.
- ``app/lessons.py``: content of the lessons on the page Learn, as data.

``app`` imports ``simplan`` and never ``executor``, and ``simplan`` never imports ``app``: the command line starts it as
a process.
"""
