"""Bench results as a pod would print them, with figures of no card."""

import json
from typing import Any

ROW: dict[str, Any] = {
    "shape": "A", "T": 2048, "tokens": 65536, "fwd_ms": 1.3, "fwd_bwd_ms": 4.6,
    "dense_cudnn_fwd_ms": 0.5, "dense_cudnn_fwd_bwd_ms": 2.3, "dense_flash_fwd_ms": 0.8,
    "dense_flash_fwd_bwd_ms": 3.3, "ratio_to_cudnn": 2.0, "peak_gib": 0.6,
    "dense_cudnn_peak_gib": 0.6, "spread": 0.02, "floor_fwd_ms": 0.35, "floor_fwd_bwd_ms": 1.2,
    "branches_ms": {"compressed": [0.1, 1.1], "selected": [0.6, 2.6], "sliding": [0.3, 1.4]},
}  # fmt: skip
LONG_ROW = ROW | {"T": 65536, "fwd_ms": 4.4, "fwd_bwd_ms": 11.9, "dense_cudnn_fwd_bwd_ms": 53.7}


def document(rows: list[dict[str, Any]], **changes: Any) -> str:
    """A whole result as JSON."""
    fields = {
        "card": "NVIDIA T1000", "torch": "2.13.0", "triton": "3.7.1", "driver": "570.1",
        "clock_mhz": 1755.0, "matmul_tflops": 7.4, "bench": "kernels", "commit": "c0ffee" * 6,
        "command": "python -m nsa_core.bench kernels", "rows": rows,
    }  # fmt: skip
    return json.dumps(fields | changes)
