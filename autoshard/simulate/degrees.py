"""The degrees of parallelism of a training step: data, tensor and pipeline parallel devices, and microbatches."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Parallel:
    """D x H x P devices (data, tensor, pipeline) and K microbatches per step. ValueError unless all are whole numbers of 1 or more."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number of 1 or more")

    @property
    def devices(self) -> int:
        return self.data * self.tensor * self.pipeline
