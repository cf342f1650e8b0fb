import numpy as np

VERSION: int
MAX_COLUMNS: int

def pack(
    width: int,
    looked_at: np.ndarray,
    forests: tuple[tuple[int, float, np.ndarray, np.ndarray, np.ndarray], ...],
    /,
) -> object: ...
def walk(packed: object, features: np.ndarray, out: np.ndarray, /) -> None: ...
