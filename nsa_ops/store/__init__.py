"""What this laptop knows, in one sqlite file; see registry.py."""

from nsa_ops.store.records import Intent, MemberPod, PodRecord, Receipt, RunRecord
from nsa_ops.store.registry import REGISTRY_NAME, Store

__all__ = ["REGISTRY_NAME", "Intent", "MemberPod", "PodRecord", "Receipt", "RunRecord", "Store"]
