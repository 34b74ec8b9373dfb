"""Draw a provisioning: what was done, what is there now, what to do next."""

from rich.console import Console

from nsa_ops.cli.render import facts, line
from nsa_ops.cli.render_checks import draw_checks
from nsa_ops.provision.provisioning import Provisioned


def draw_provisioned(console: Console, found: Provisioned) -> None:
    """The receipt and the machine's checks."""
    receipt, installed = found.receipt, found.receipt.installed
    facts(
        console,
        [
            ("pod", found.pod.name),
            ("done", ", ".join(found.done) or "nothing: it was provisioned already"),
            ("python", receipt.python),
            ("torch", f"{installed.torch_version if installed else '?'}, {receipt.torch_build}"),
            ("packages", installed.num_packages if installed else ""),
            ("flash-attn", receipt.flash_attention),
            ("code", f"{receipt.code_id} of commit {receipt.code_commit[:12]}"),
            ("missing", ", ".join(receipt.missing)),
        ],
    )
    draw_checks(console, found.checks)
    line(console, f"next: `nsa-ops preflight {found.pod.name} --profile {receipt.profile}`")
