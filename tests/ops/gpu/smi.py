"""What `nvidia-smi -q -x` prints of cards that a test makes up."""

A100 = "NVIDIA A100-SXM4-80GB"


def smi_xml(*used_mib: int, names: tuple[str, ...] = ()) -> str:
    """Cards with this much memory in use, each by one process; 0 for a free one."""
    cards = [
        _card(place, names[place] if names else A100, used) for place, used in enumerate(used_mib)
    ]
    return (
        '<?xml version="1.0" ?>\n<nvidia_smi_log><driver_version>580.65.06</driver_version>'
        f"<attached_gpus>{len(cards)}</attached_gpus>{''.join(cards)}</nvidia_smi_log>\n"
    )


def _card(place: int, name: str, used: int) -> str:
    process = (
        "<process_info><pid>77</pid><type>C</type><process_name>python</process_name>"
        f"<used_memory>{used} MiB</used_memory></process_info>"
    )
    return (
        f'<gpu id="00000000:{place + 1:02X}:00.0"><product_name>{name}</product_name>'
        f"<uuid>GPU-{place}a</uuid><minor_number>{place}</minor_number>"
        "<mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig>"
        "</mig_mode>"
        f"<fb_memory_usage><total>81920 MiB</total><used>{used + 3} MiB</used></fb_memory_usage>"
        f"<processes>{process if used else ''}</processes></gpu>"
    )
