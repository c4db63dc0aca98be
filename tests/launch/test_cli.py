"""Wrong usage ends with code 2 and one line: option, value, what is allowed."""

import os
import subprocess
import sys
import tomllib

import pytest

from gradwire import cli

GRADWIRE = [sys.executable, "-m", "gradwire"]


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.py").write_text("")
    (tmp_path / "bad.toml").write_text("mesh = [")
    (tmp_path / "good.toml").write_text('accumulate = 1\nbatch_norm = "local"\n[mesh]\ndata = 2\n')
    (tmp_path / "typo.toml").write_text("acumulate = 2\n")
    (tmp_path / "zero.toml").write_text("accumulate = 0\n")
    return "ok.py"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nowhere.py"], ["nowhere.py", "does not exist"]),
        (["run", "."], ["is a folder"]),
        (["run", "-m", "no.such.module"], ["-m no.such.module"]),
        (["run", "-n", "0", "ok.py"], ["-n", "'0'", "1 or more"]),
        (["run", "-n", "two", "ok.py"], ["-n", "'two'"]),
        (["run", "--nodes", "2", "ok.py"], ["--nodes 2", "--rendezvous"]),
        (["run", "--nodes", "2", "--rendezvous", "h:1", "ok.py"], ["--node-rank"]),
        (["run", "--nodes", "2", "--node-rank", "2", "--rendezvous", "h:1", "ok.py"], ["--node-rank 2", "0 to 1"]),
        (["run", "--rendezvous", "host", "ok.py"], ["--rendezvous", "'host'", "HOST:PORT"]),
        (["run", "--rendezvous", "host:99999", "ok.py"], ["'host:99999'", "65535"]),
        (["run", "--sync", "q5", "ok.py"], ["unknown name 'q5'", "allowed: exact, bf16"]),
        (["run", "--sync", "local:every=0", "ok.py"], ["every=0", "at least 1"]),
        (["plan", "show", "--sync", "topk"], ["topk needs ratio="]),
        (["run", "--plan", "none.toml", "ok.py"], ["none.toml", "cannot be read"]),
        (["run", "--plan", "bad.toml", "ok.py"], ["bad.toml", "not valid TOML"]),
        (
            ["run", "--plan", "typo.toml", "ok.py"],
            ["typo.toml", "unknown key 'acumulate'", "allowed: mesh, sync, accumulate"],
        ),
        (["run", "--plan", "zero.toml", "ok.py"], ["zero.toml", "accumulate=0", "at least 1"]),
        (["run", "-n", "3", "--plan", "good.toml", "ok.py"], ["mesh data=2 needs 2 ranks", "use data=3 or start 2"]),
        (["run", "--mesh", "ring=2", "ok.py"], ["--mesh", "'ring'", "pipeline, data, shard, tensor=N"]),
        (["run", "--mesh", "data=x", "ok.py"], ["--mesh", "'x'"]),
        (["run", "--accumulate", "0", "ok.py"], ["--accumulate", "'0'"]),
        (["run", "--batch-norm", "x", "ok.py"], ["--batch-norm", "'x'", "local", "sync"]),
        (["run", "--on-nonfinite", "x", "ok.py"], ["--on-nonfinite", "skip", "stop"]),
        (["run", "--timeout", "-1", "ok.py"], ["--timeout", "-1"]),
        (["run", "--no-such-option", "ok.py"], ["--no-such-option"]),
        (["run"], ["SCRIPT"]),
        ([], ["COMMAND"]),
    ],
)
def test_wrong_usage_is_one_clear_line(script, capsys, arguments, words):
    assert cli.main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and printed.startswith("gradwire: ")
    assert all(word in printed for word in words), printed


def options(*arguments):
    return cli._parser().parse_args(["run", *arguments, "ok.py"])  # pyright: ignore[reportPrivateUsage]


def plan_text(*arguments):
    return cli._plan_text(options(*arguments))  # pyright: ignore[reportPrivateUsage]


def test_options_become_a_plan():
    text = plan_text(
        "-n", "2", "--mesh", "data=2", "--accumulate", "4", "--batch-norm", "sync", "--on-nonfinite", "stop"
    )
    wanted = {"accumulate": 4, "batch_norm": "sync", "on_nonfinite": "stop", "mesh": {"data": 2}}
    assert tomllib.loads(text or "") == wanted
    assert plan_text() is None


def test_options_beat_the_plan_file_and_leave_the_rest(script, tmp_path):
    text = plan_text("-n", "2", "--plan", "good.toml", "--accumulate", "8")
    assert tomllib.loads(text or "") == {**tomllib.loads((tmp_path / "good.toml").read_text()), "accumulate": 8}
    assert plan_text("-n", "2", "--plan", "good.toml") == (tmp_path / "good.toml").read_text()


def test_what_follows_the_script_is_the_scripts(script):
    parsed = cli._parser().parse_args(["run", "-n", "2", "ok.py", "-n", "7", "--plan", "x"])  # pyright: ignore
    assert (parsed.n, parsed.arguments) == (2, ["-n", "7", "--plan", "x"])


def test_a_module_is_run_and_gets_its_arguments(tmp_path):
    (tmp_path / "mine.py").write_text("import sys; print(sys.argv[1:])")
    command = [sys.executable, "-m", "gradwire", "run", "-m", "mine", "--flag", "-m"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (0, "['--flag', '-m']\n"), done.stderr


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("gradwire ")


def test_a_plan_is_explained_with_what_it_sends(script, capsys):
    assert cli.main(["plan", "show", "good.toml", "--sync", "accumulate:every=4"]) == 0
    said = capsys.readouterr().out
    assert "agreed every 4 batches" in said
    assert "1.00 bytes per parameter and step" in said


@pytest.mark.parametrize(
    ("sync", "num_ranks", "words"),
    [
        ("exact", 2, "sends 4.00 bytes per parameter and step (exact every step: 4.00)\n"),
        ("exact", 1, "sends 0 bytes per parameter and step (exact every step: 0)\n"),
        ("q4", 2, "error feedback, tensors below 1,024 numbers exact\n"),
        ("q4", 1, "(exact every step: 0)\n"),
        ("topk:ratio=0.6", 2, "sends 4.80 bytes per parameter and step (exact every step: 4.00): more than exact\n"),
        ("local:every=1", 2, "(exact every step: 4.00): as much as exact\n"),
        ("topk:ratio=0.5", 2, "(exact every step: 4.00): as much as exact\n"),
        ("local:every=64,codec=lowrank(rank=4)", 2, "sends 0.000488 bytes per parameter and step (for matrices of 512"),
        ("lowrank:exact_steps=3", 2, "(for matrices of 512 x 512; it depends on the shapes) (exact every step: 4.00)"),
    ],
)
def test_what_a_plan_sends_is_said_with_what_it_rests_on(capsys, sync, num_ranks, words):
    assert cli.main(["plan", "show", "--sync", sync, "-n", str(num_ranks)]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["plan", "show"], ["--help"], ["--version"]], ids=lambda words: words[0])
def test_a_reader_that_has_gone_is_met_quietly(arguments, unbuffered):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", "gradwire", *arguments]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, text=True, timeout=60)
    finally:
        os.close(writer)
    assert done.returncode in (0, 141)
    assert done.stderr == ""


def test_the_sync_option_reaches_the_plan(script):
    assert tomllib.loads(plan_text("--sync", "local:every=16,codec=q4") or "") == {"sync": "local:every=16,codec=q4"}


def test_a_checkpoint_is_shown_and_exported(tmp_path):
    script = (
        "import sys, torch, gradwire as gw\n"
        "with gw.init():\n"
        "    model = torch.nn.Linear(3, 2)\n"
        "    gw.save(sys.argv[1], model, torch.optim.Adam(model.parameters()), epoch=3)\n"
    )
    (tmp_path / "save.py").write_text(script)
    saved, file = str(tmp_path / "saved"), str(tmp_path / "model.safetensors")
    subprocess.run([sys.executable, tmp_path / "save.py", saved], check=True, timeout=60)
    shown = subprocess.run([*GRADWIRE, "inspect", saved], capture_output=True, text=True, timeout=60, check=False)
    assert shown.returncode == 0 and "weight: float32 (2, 3)" in shown.stdout and "epoch (value): 3" in shown.stdout
    done = subprocess.run([*GRADWIRE, "export", saved, file], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout.startswith(f"wrote {file}")
    missing = subprocess.run([*GRADWIRE, "inspect", file], capture_output=True, text=True, timeout=60, check=False)
    assert missing.returncode == 1 and "no folder" in missing.stderr and "Traceback" not in missing.stderr


def test_split_says_where_the_cuts_fall_and_refuses_what_it_cannot_cut(tmp_path):
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.ones(8, 8)\n"
    )
    model = f"{tmp_path / 'model.py'}:build"
    for options, code, words in (
        (["2"], 0, ["stage 1  rank 1", "schedule 1f1b", "bubble", "rank 0  F0"]),
        (["2", "--schedule", "interleaved"], 0, ["4 stages"]),
        (["5"], 2, ["too few for 5 stages", "use pipeline=4"]),
        (["2", "--speeds", "1,2,3"], 2, ["pipeline.speeds has 3 values"]),
    ):
        words_of = [*GRADWIRE, "split", model, "--pipeline", *options]
        done = subprocess.run(words_of, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
        assert all(word in done.stdout + done.stderr for word in words), done.stdout + done.stderr
