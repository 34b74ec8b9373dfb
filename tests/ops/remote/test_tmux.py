from nsa_ops.remote.tmux import Tmux, Window, is_no_server, parse_windows, session_name


def test_tmux_is_started_alone_with_a_plain_terminal() -> None:
    argv = Tmux("sock").new_session("nsa-a", "train", "/run", ["sh", "-c", "x y"])
    assert argv[:10] == (
        "env", "-u", "TMUX", "TERM=xterm-256color", "tmux", "-L", "sock", "-f", "/dev/null",
        "new-session",
    )  # fmt: skip
    assert argv[-4:] == ("--", "sh", "-c", "x y")


def test_a_session_is_meant_exactly_and_not_by_its_beginning() -> None:
    assert "=nsa-run-1" in Tmux().kill_session("nsa-run-1")
    assert "=nsa-run-1:" in Tmux().new_window("nsa-run-1", "watchdog", "/run", ["true"])


def test_a_session_name_has_no_dots_and_belongs_to_one_run() -> None:
    run_ids = ["x.1", "x_1", "x-1", "x..1", "x.-1", "x1"]
    names = [session_name(run_id) for run_id in run_ids]
    assert len(set(names)) == len(run_ids)
    assert not set("".join(names)) & set(".:")


def test_windows_are_parsed_and_noise_is_passed_over() -> None:
    stdout = "nsa-a|train|12|0|/runs/a\nnoise\nnsa-a|watchdog|13|1|/runs/a|b\n"
    stdout += f"nsa-a|train|²|0|/runs/a\nnsa-a|train|{'9' * 5000}|0|/runs/a\n"
    assert parse_windows(stdout) == [
        Window("nsa-a", "train", 12, is_dead=False, folder="/runs/a"),
        Window("nsa-a", "watchdog", 13, is_dead=True, folder="/runs/a|b"),
    ]


def test_no_server_is_told_from_a_broken_tmux() -> None:
    assert is_no_server("no server running on /tmp/tmux-0/nsa\n")
    assert is_no_server("error connecting to /tmp/tmux-0/nsa (No such file or directory)\n")
    for ending in ("server exited unexpectedly", "lost server", "no current target", "no sessions"):
        assert is_no_server(f"{ending}\n")
    assert not is_no_server("open terminal failed: missing or unsuitable terminal: kitty\n")
