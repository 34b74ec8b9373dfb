"""The ids of a text, as every tokenizer gives them and a shard takes them."""

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.uint32]
