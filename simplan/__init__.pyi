"""Types of the public API, whose names are loaded on first access."""

from simplan.api import goodput as goodput
from simplan.api import predict as predict
from simplan.api import search as search
from simplan.api import sweep as sweep
from simplan.errors import SimplanError as SimplanError
from simplan.errors import SpecError as SpecError
from simplan.explain import explain as explain
from simplan.goodput.result import GoodputResult as GoodputResult
from simplan.interop.compare_files import compare as compare
from simplan.job import Job as Job
from simplan.prediction import Prediction as Prediction
from simplan.scenario import Scenario as Scenario
from simplan.scenario import load_scenario as load_scenario
from simplan.scenario import load_search as load_search
from simplan.scenario import make_job as make_job
from simplan.search import Fix as Fix
from simplan.search import SearchResult as SearchResult
from simplan.search import SearchSpace as SearchSpace
from simplan.search import fixes as fixes

__version__: str
__all__: list[str]
