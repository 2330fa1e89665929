"""Callback for the Trainer of Lightning that records its steps."""

from __future__ import annotations

import os
from typing import Any

from executor.record.loop import LoopRecorder

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:  # then the class below is no callback, and nobody has a Trainer for it
    Callback = object


class LightningCallback(Callback):  # type: ignore[misc]
    """Records every update of a fit: ``Trainer(..., callbacks=[LightningCallback("measurement.json")])``.

    Time of validations is left out.

    Args:
        file, look: See ``executor.record.record``.
        samples_per_step: Samples of all ranks between two updates; None if it shall not be compared.
    """

    def __init__(self, file: str | os.PathLike[str], *, samples_per_step: int | None = None, look: bool = True) -> None:
        self._file, self._samples_per_step, self._look = file, samples_per_step, look
        self._recorder: LoopRecorder | None = None
        self._updates = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begins the recording; of several optimizers, states are not compared."""
        optimizers = trainer.optimizers
        self._updates = trainer.global_step
        self._recorder = LoopRecorder(
            self._file,
            samples_per_step=self._samples_per_step,
            module=pl_module,
            optimizer=optimizers[0] if len(optimizers) == 1 else None,
            device=pl_module.device,
            look=self._look,
        )
        self._recorder.start()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ends a step if the batch ended with an update, which not every accumulated batch does."""
        if self._recorder is not None and trainer.global_step > self._updates:
            self._updates = trainer.global_step
            self._recorder.step()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Leaves out the time of a validation."""
        if self._recorder is not None:
            self._recorder.begin_step()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Ends the recording without a file."""
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            recorder.cancel()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Writes the file on rank 0."""
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            recorder.finish()
