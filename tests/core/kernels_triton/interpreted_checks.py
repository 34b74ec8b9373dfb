"""Run the probe of the decode kernels on the kernels themselves, under the interpreter, as JSON."""

import json
import sys
from dataclasses import asdict, replace

import torch
from torch import Tensor

from nsa_core.checks.decoding import decode_kernels_probe
from nsa_core.kernels.decode_attention import CachedPairs, DecodedToken
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.triton.decode_host import TritonDecode
from tests.core.model.cases import small_config, small_model


class WindowIsOneShort(TritonDecode):
    """The oldest key of the window is left out."""

    def attend(
        self,
        q_BHD: Tensor,
        pairs: CachedPairs,
        gate_BH3: Tensor,
        position_B: Tensor,
        geometry: BlockGeometry,
    ) -> DecodedToken:
        """See `DecodeAttention.attend`."""
        shorter = replace(geometry, window=geometry.window - 1)
        return super().attend(q_BHD, pairs, gate_BH3, position_B, shorter)


def probed(kernels: TritonDecode, dtype: torch.dtype) -> dict[str, float]:
    """What the probe says of a whole model with these kernels."""
    config = small_config(head_dim_k=16, head_dim_v=16)
    found = decode_kernels_probe(small_model(config, dtype=torch.float32), kernels, dtype)
    said = {name: value for name, value in asdict(found).items() if name != "dtype"}
    return said | {"is_equal": found.is_equal}


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {
        "float32": probed(TritonDecode(), torch.float32),
        "planted": probed(WindowIsOneShort(), torch.float32),
    }
    sys.stdout.write(json.dumps(results))
