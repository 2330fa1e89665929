"""The workbench: pages that show what simplan predicts, in a browser. ``simplan dashboard`` starts it.

Every page is a file in ``app/views`` (a folder ``pages`` means something else to Streamlit);
``app/main.py`` lists them. A page is one function, run by ``run_page``::

    from app.page import run_page


    def show() -> None:
        scenario = answers.scenario(state.document())      # raises SpecError: run_page shows it as a sentence
        numbers = answers.quick_numbers(state.document())   # cached; step time and memory in milliseconds, or None
        result = answers.plan(state.document())             # worked out in another process, awaited politely, kept
        show_figure(memory_figure(...), "memory by rank", alt="...")


    if __name__ == "__main__":
        run_page(show)

What belongs where:

- ``app/state.py``: what is asked. There is one *document*, the scenario as plain data (what its YAML file would say),
  and *view values*, small things that a page remembers, e.g. a price. Both are kept for the session and stand in the
  address of the page; ``app/link.py`` is the codec. Widgets are bound to them by ``app/fields.py``. What is not state
  is not in a link: a link shows things and starts nothing.
- ``app/answers.py``: scenario -> prediction, cached by the scenario's text for all sessions.
- ``app/figures``: figures as pure functions of data, without Streamlit; ``app/palette.py`` has the colours. A figure
  has no colours of text and paper: ``show_figure`` lets the theme choose them, light or dark.
- ``app/components``: what pages share: figures with their downloads, errors as sentences, files to take away.
- ``app/words.py``: what words mean, from simplan's own definitions; every number has it as help.

``app`` imports ``simplan`` and never ``executor``, and ``simplan`` never imports ``app``: the command line starts it as
a process.
"""
