"""Recording of training loops that users wrote: ``from executor.record import record``."""

from executor.record.loop import LoopRecorder, record

__all__ = ["LoopRecorder", "record"]
