"""Launch scripts are followed as bash follows them, and nothing of them is run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from simplan.errors import SpecError
from simplan.interop.frameworks.shell import read_launches

_SCRIPTS = {
    "continuations and comments": """
        # torchrun --not-this
        torchrun --nproc_per_node 8 \\
            train.py --a 1 \\
            --b=2 '--c d' "e  f"\\ g --name\\=x # the end
    """,
    "variables": """
        A=1; B="$A 2"; C='$A'; D=${B}x
        torchrun train.py $A $B "$B" $C "${D}" ${NONE:-3 4} "${NONE:-5 6}" ${A:+set} ${A:=7} --empty ""
    """,
    "arrays": """
        ONE=(--a "b c" # comment
             --d)
        ONE+=(--e); TEXT="--f
          --g 8"
        TEXT+=" --h"
        torchrun train.py ${ONE[@]} "${ONE[@]}" $TEXT ${ONE[1]} "${ONE[0]}" $ONE ${#ONE[@]}
    """,
    "arithmetic": """
        NODES=4; PER_NODE=8; WORLD=$(($NODES * PER_NODE)); DP=$((WORLD / (2 * 3)))
        torchrun train.py --batch $(( DP * 16 + 1 )) --rest $((WORLD % 5)) x$((2-5))y
    """,
    "decided conditions": """
        SIZE=7B; TP=2
        if [ "$SIZE" = 13B ]; then A="--layers 40"
        elif [[ $SIZE == 7* && $TP -gt 1 ]]; then A="--layers 32"
        else A="--layers 1"; fi
        case $SIZE in
          7B|8B) B="--heads 32" ;;
          *) B="--heads 40"
        esac
        [ -z "$A" ] && A=--none
        [ "$TP" -eq 1 ] || B+=" --sp"
        if (( TP > 1 )); then B+=" --more"; fi
        if ! [ $TP -lt 2 ]; then B+=" --not"; fi
        for SPLIT in 969; do B+=" --split $SPLIT"; done
        torchrun train.py $A $B
    """,
    "here-documents, functions and redirections": """
        cat > /dev/null <<EOF
torchrun not.py 'open
EOF
        options() { X="--$1 $2"; }
        options tp 4 2>&1
        torchrun train.py $X 2> /dev/null --y
    """,
    "commands in variables": """
        OPTIONS="--a 1 \\
            --b 2"
        RUN="torchrun train.py $OPTIONS --c"
        eval $RUN
    """,
    "shell in a shell": """
        OPTIONS="--a 1"
        bash -c "torchrun train.py $OPTIONS --b 'x y'"
    """,
    "command in a shell": """
        OPTIONS=(
            --a 1
        )
        RUN="torchrun train.py \\
            ${OPTIONS[@]} \\
            --b 2"
        bash -c "RANK=\\$SLURM_PROCID $RUN"
    """,
    "defaults that are assigned": """
        SET=1; EMPTY=
        : "${SET:=2}" "${EMPTY:=3}" "${NONE:=4}" "${SUM:=$(( NONE + 1 ))}"
        : ${EMPTY=5} ${OTHER=6}
        torchrun train.py $SET $EMPTY $NONE $SUM $OTHER
    """,
    "script in a here-document": """
        export OUTER=1
        bash <<EOF
        INNER="--a $OUTER"
        torchrun train.py \\$INNER --b $((1 + 1)) \\\\
            --c
EOF
    """,
    "script in a quoted here-document": """
        export OUTER=1
        bash <<'EOF'
        INNER="--a $OUTER"
        torchrun train.py $INNER --b
EOF
    """,
}


@pytest.mark.parametrize("name", _SCRIPTS)
def test_script_gives_the_arguments_that_bash_gives(name: str, tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    fake = tmp_path / "torchrun"
    fake.write_text(f"#!{bash}\nprintf '%s\\0' \"$@\"\n")
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    run = subprocess.run([bash, "-c", _SCRIPTS[name]], capture_output=True, text=True, env=environment, check=True)
    expected = run.stdout.split("\0")[:-1]

    (launch,) = read_launches(_SCRIPTS[name], "train.sh")

    words = [launch.program.text, *(word.text for word in launch.arguments)]
    assert words == expected[expected.index("train.py") :]
    assert not any(word.unknown or word.condition for word in launch.arguments)


_WRITES = r"""
ZERO=3 BATCH=64 NAME=out.json
cat <<EOT > heredoc.json
{"train_batch_size": $BATCH, "path": "\$HOME \\ 'x'", "stage": ${ZERO}, "sum": $((BATCH * 2))}
EOT
cat > ./quoted.yaml <<'EOT' && echo done > /dev/null
name: $ZERO \$BATCH `date`
EOT
	cat <<-EOT > "$NAME"
	{"a": 1,
	"b": 2}
	EOT
echo '{"bf16": {"enabled": true}}' > echo.json
echo "{\"stage\": $ZERO}" >> echo.json
echo -e 'a: 1\nb: 2' > escaped.yaml
printf '%s\n' "$BATCH" x > lines.txt
printf '{\n "a": 1\n}\n' > printf.json
sed "s/CONFIG_BATCH/${BATCH}/" template.json | sed "s/CONFIG_ZERO/$ZERO/g" > sed.json
sed -i 's/CONFIG_BATCH/8/' inplace.json
cat template.json heredoc.json > both.json
cat <<EOT | tee tee.json > /dev/null
{"c": $BATCH}
EOT
write() {
  cat > function.json <<EOT
{"stage": $1}
EOT
}
write 2
for STAGE in 1; do echo $STAGE > loop.txt; done
if [ $ZERO -eq 3 ]; then echo yes > branch.txt; else echo no > branch.txt; fi
: > empty.txt 2> error.txt
true <<EOT
nothing
EOT
{ echo a; } > group.txt
torchrun train.py
"""


def test_script_writes_the_files_that_bash_writes(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    for name in ("template.json", "inplace.json"):
        (tmp_path / name).write_text('{"train_batch_size": CONFIG_BATCH, "stage": CONFIG_ZERO, "x": "CONFIG_ZERO"}\n')

    (launch,) = read_launches(_WRITES, "train.sh", tmp_path)

    script = _WRITES.replace("torchrun train.py", "")
    subprocess.run([bash, "-c", script], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, check=True)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    read = {name: "".join(word.text for word in value) for name, value in launch.files.items() if name in written}
    others = {"template.json", "empty.txt", "error.txt", "group.txt"}
    assert read == {name: text for name, text in written.items() if name not in others}
    assert not any(word.doubt for name in read for word in launch.files[name])


def test_words_of_a_command_in_a_shell_keep_their_lines() -> None:
    (launch,) = read_launches(_SCRIPTS["command in a shell"], "train.sh")
    assert [(word.text, word.line) for word in launch.arguments] == [("--a", 3), ("1", 3), ("--b", 7), ("2", 7)]


def test_nothing_of_a_script_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    text = f"""
        touch {marker}; X=$(touch {marker}); Y=`touch {marker}`; eval touch {marker}; bash -c 'touch {marker}'
        torchrun train.py --x $X --y "$Y" --z <(touch {marker}) --w $((a[$(touch {marker})]))
    """

    (launch,) = read_launches(text, "train.sh")

    assert not marker.exists()
    unknown = [word.text.split()[0] for word in launch.arguments if word.unknown]
    assert unknown == ["$(touch", "`touch", "<(touch", "$((a[$(touch"]


def test_unknown_values_and_undecided_branches_are_told() -> None:
    text = """
        TP=$1
        if [ -d /data ]; then EXTRA="--mock-data"; MODE=a; else MODE=b; fi
        ARGS=(--tp $TP)
        if [ "$FP8" = yes ]; then
          ARGS+=(--fp8)
        fi
        torchrun train.py "${ARGS[@]}" $EXTRA --mode $MODE $MORE
    """

    (launch,) = read_launches(text, "train.sh")

    told = {
        word.text: word.condition or str(word.unknown) for word in launch.arguments if word.unknown or word.condition
    }
    assert (told.pop("--fp8"), told.pop("--mock-data")) == (5, 3)
    why = {"$1": "argument of the script", "$MODE": "condition in line 3", "$MORE": "is not set"}
    assert told.keys() == why.keys()
    assert all(why[name] in str(text) for name, text in told.items())
    lines = {word.text: word.line for word in launch.arguments}
    assert (lines["--tp"], lines["--fp8"], lines["--mode"]) == (4, 6, 8)


def test_options_that_a_condition_adds_to_a_string_are_the_only_ones_in_doubt() -> None:
    text = """
        OPTIONS="--tp 2"
        if [ -e /data ]; then OPTIONS="$OPTIONS --mock-data"; fi
        if [ -e /fast ]; then OPTIONS="--pp 4 $OPTIONS"; fi
        torchrun train.py $OPTIONS
    """

    (launch,) = read_launches(text, "train.sh")

    assert not any(word.unknown for word in launch.arguments)
    told = [(word.text, word.condition) for word in launch.arguments]
    assert told == [("--pp", 4), ("4", 4), ("--tp", None), ("2", None), ("--mock-data", 3)]


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("torchrun --nproc_per_node 8 --nnodes 4 train.py", 32),
        ("torchrun --nproc-per-node=8 train.py", 8),
        ("python3 -u -m torch.distributed.launch --nproc_per_node=4 --nnodes=2 --use_env train.py", 8),
        ("#SBATCH -N 3 --gpus-per-node=h100:8\nsrun torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 train.py", 24),
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun -l python train.py", 8),
        (
            "#SBATCH --nodes=2\n#SBATCH --gres=gpu:a100:8\nsrun bash -c 'torchrun --nnodes 2 --nproc_per_node 8 x.py'",
            16,
        ),
        ("deepspeed --num_nodes 2 --num_gpus 8 --hostfile h train.py --x", 16),
        ("mpirun -np 16 --allow-run-as-root -x PATH python train.py", 16),
        ("N=$(wc -l < hostfile)\ntorchrun --nnodes $N --nproc_per_node 8 train.py", None),
        ("torchrun --nnodes 1:4 --nproc_per_node 8 train.py", None),
        ("--num-layers 2 --x", None),
        ("export A=()\ntorchrun --nproc_per_node 8 --nnodes ${A:-2} train.py", 16),
    ],
)
def test_launcher_tells_the_number_of_devices(text: str, devices: int | None) -> None:
    (launch,) = read_launches(text, "train.sh")

    assert launch.num_devices == devices
    assert launch.program.text in ("train.py", "x.py", "")


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('A=1\ntorchrun x.py "--a', 2, 'a quote is not closed; add "'),
        ("A=(1\n2", 1, "an array is not closed; add )"),
        ("echo $(date", 1, "a bracket is not closed; add )"),
        ("if true; then\n x", 1, "fi is missing; add fi"),
        ("echo a\nfi", 2, "fi has no beginning"),
        ("\0\1\2", None, "it is binary"),
        ("A=aaaaaaaaaa\n" + "A=$A$A\n" * 40, None, "the variable A is too long"),
        ("f() { f; f; }\nf", None, "the script has too many steps"),
        ("( " * 200, 1, "it is nested too deeply"),
        ("f() " * 9000, 1, "it is nested too deeply"),
        ("A=" + "${B:-" * 200 + "}" * 200, 1, "it is nested too deeply"),
    ],
)
def test_wrong_script_gives_one_sentence(text: str, line: int | None, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_launches(text, "train.sh")

    (problem,) = caught.value.problems
    assert says in f"{problem.rule}; {problem.fix}"
    assert line is None or problem.line == line
