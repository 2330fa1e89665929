"""The dashboard: web pages that show simplan's predictions. ``simplan dashboard`` starts it.

Every page is a file in ``app/views`` (a folder ``pages`` means something else to Streamlit);
``app/main.py`` lists them. A page is one function, run by ``run_page``::

    from app.page import run_page


    def show() -> None:
        scenario = result_cache.scenario(state.document())  # raises SpecError: run_page shows the error
        headline = result_cache.headline(state.document())  # cached; in milliseconds, or None
        result = result_cache.plan(state.document())        # computed in another process, awaited, cached
        show_figure(memory_figure(...), "memory by rank", alt="...")


    if __name__ == "__main__":
        run_page(show)

Modules:

- ``app/state.py``: state of a session. There is one *document*, the scenario as plain data (the content of its YAML
  file), and *view values*, small settings of pages, e.g. a price. Both last for the session and are part of the page's
  address. ``app/fields.py`` binds widgets to both. A link contains nothing else: opening a link shows pages and starts
  nothing.
- ``app/result_cache.py``: scenario -> prediction, cached by the scenario's text for all sessions.
- ``app/results``: data of pages, computed in worker processes, which ``app/jobs`` runs and ``app/awaited.py`` awaits.
- ``app/figures``: figures as pure functions of data, without Streamlit; ``style.py`` has the colors. Figures define no
  colors of text and background: ``show_figure`` leaves them to the light or dark theme.
- ``app/components``: parts that pages share: metrics, tables, figures with downloads, the scenario form.
- ``app/lessons.py``: content of the lessons on the page Learn, as data.
- ``app/definitions.py``: definitions of terms, from simplan itself; every number shows its definition as help.

``app`` imports ``simplan`` and never ``executor``, and ``simplan`` never imports ``app``: the command line starts it as
a process.
"""
