"""One wrong key or value, one line that says where, what, what is allowed, and what was probably meant."""

from __future__ import annotations

import math

import pytest

from hpcli.config import Problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training:\n  stepz: 4\n", "x.yaml:2: training.stepz: unknown key; did you mean 'steps'?"),
        ("modle: {}\n", "x.yaml:1: modle: unknown key; did you mean 'model'?"),
        ("training:\n  lr: 1\n", "x.yaml:2: training.lr: unknown key; it belongs under optimizer"),
        ("steps: 1\n", "x.yaml:1: steps: unknown key; it belongs under training"),
        ("model: {platform: torch}\n", "x.yaml:1: model.platform: unknown key; it belongs at the top level"),
        ("parallelism: {tp: 2}\n", "x.yaml:1: parallelism.tp: unknown key; did you mean 'tensor_parallel'?"),
        ("learning_rate: 2\n", "x.yaml:1: learning_rate: unknown key; did you mean 'optimizer.lr'?"),
        (
            "parallelism: {Data-Parallel-Shard: 2}\n",
            "x.yaml:1: parallelism.Data-Parallel-Shard: unknown key; did you mean 'data_parallel_shard'?",
        ),
        (
            "training.steps: 3\n",
            'x.yaml:1: "training.steps": unknown key; sections are nested: write training: {steps: ...}',
        ),
        (
            "device_options: {zzz: 1}\n",
            "x.yaml:1: device_options.zzz: unknown key; known here: strict_dtypes",
        ),
        (
            "launch:\n  1: 2\n",
            "x.yaml:2: launch.1: unknown key; known here: timeout_seconds, ranks",
        ),
    ],
)
def test_unknown_key_names_the_one_that_was_meant(problem, text, expected):
    assert problem(text) == expected


def test_duplicate_key_gives_both_lines(problem):
    text = "training:\n  steps: 1\n  seed: 3\n  steps: 2\n"
    assert problem(text) == "x.yaml:4: training.steps: duplicate key; it is already given on line 2"


def test_duplicate_section_gives_both_lines(problem):
    text = "training: {steps: 1}\n'training': {seed: 3}\n"
    assert problem(text) == "x.yaml:2: training: duplicate key; it is already given on line 1"


STEPS = "allowed: a whole number from 1 to 1000000000000"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0", f"0 is out of range; {STEPS}"),
        ("-3", f"-3 is out of range; {STEPS}"),
        ("9" * 70, f"{'9' * 45}... (70 characters) is out of range; {STEPS}"),
        ("9" * 5000, f"{'9' * 45}... (5000 characters) is out of range; {STEPS}"),
        ("2.5", f"2.5 is not a whole number; {STEPS}"),
        ("3.0", f"3.0 is not a whole number; write 3; {STEPS}"),
        ("1e3", f"1e3 is not a whole number; write 1000; {STEPS}"),
        ("3,000", f"3,000 is text, not a whole number; write 3000; {STEPS}"),
        ("1_000", f"1_000 is text, not a whole number; write 1000; {STEPS}"),
        ("010", f"010 is text, not a whole number; write 10; {STEPS}"),
        ('"10"', f'"10" is text, not a whole number; remove the quotes; {STEPS}'),
        ("ten", f"ten is text, not a whole number; {STEPS}"),
        ("true", f"true is a boolean, not a whole number; {STEPS}"),
        (".inf", f".inf is not a whole number; {STEPS}"),
        (".nan", f".nan is not a whole number; {STEPS}"),
        ("", f"has no value; {STEPS}"),
        ("null", f"has no value; {STEPS}"),
        ("[1]", f"is a list; {STEPS}"),
        ("{a: 1}", f"is a value, not a section; {STEPS}"),
    ],
)
def test_whole_number_refuses(problem, value, expected):
    assert problem(f"training:\n  steps: {value}\n") == f"x.yaml:2: training.steps: {expected}"


@pytest.mark.parametrize("value", ["on", "off", "yes", "no", "y", "n", "1", "0", '"true"', "maybe"])
def test_boolean_is_true_or_false_only(problem, value):
    expected = f"x.yaml:1: training.deterministic: {value} is not a boolean; write true or false"
    assert problem(f"training: {{deterministic: {value}}}") == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1e-5", 1e-5),
        ("1e+5", 1e5),
        ("1E3", 1e3),
        (".5", 0.5),
        ("5.", 5.0),
        ("3", 3.0),
        ("0", 0.0),
        ("0x10", 16.0),
    ],
)
def test_number_is_read_as_a_person_reads_it(load, value, expected):
    lr = load(f"optimizer: {{lr: {value}}}").config.optimizer.lr
    assert lr == expected
    assert type(lr) is float


@pytest.mark.parametrize(
    "value", ["-1e-3", ".nan", ".inf", "1e999", "inf", "1:30", "2024-01-01", '"1e-3"', "false"]
)
def test_learning_rate_refuses(problem, value):
    line = problem(f"optimizer: {{lr: {value}}}")
    assert line.startswith(f"x.yaml:1: optimizer.lr: {value} is ")
    assert line.endswith("allowed: a number of at least 0")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("inf", math.inf),
        ("-inf", -math.inf),
        (".inf", math.inf),
        ('"inf"', math.inf),
        ("2", 2.0),
        ("0.5", 0.5),
        ('"3"', 3.0),
    ],
)
def test_norm_type_is_a_number_or_its_text(load, value, expected):
    assert load(f"training: {{norm_type: {value}}}").config.training.norm_type == expected


def test_norm_type_and_max_norm_refuse_what_has_no_meaning(problems):
    assert problems("training:\n  norm_type: -1\n  max_norm: -0.5\n") == [
        "x.yaml:2: training.norm_type: -1 is out of range; allowed: a number of at least 0, inf or -inf",
        "x.yaml:3: training.max_norm: -0.5 is out of range; allowed: a number of at least 0 or inf",
    ]
    assert problems("training:\n  norm_type: .nan\n  max_norm: .nan\n") == [
        "x.yaml:2: training.norm_type: .nan is not a number; allowed: a number of at least 0, inf or -inf",
        "x.yaml:3: training.max_norm: .nan is not a number; allowed: a number of at least 0 or inf",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("platform: jax", "platform: jax is not a value of this key; allowed: torch or mindspore"),
        (
            "device: gpu",
            (
                "device: gpu is not a value of this key; did you mean 'cuda'? Allowed: auto, cpu, cuda, npu "
                "or "
                "sim-npu"
            ),
        ),
        (
            "training: {compute_dtype: bf16}",
            (
                "training.compute_dtype: bf16 is not a value of this key; did you mean 'bfloat16'? "
                "Allowed: float32, bfloat16 or float16"
            ),
        ),
        (
            "training: {activation_checkpointing: false}",
            (
                "training.activation_checkpointing: false is not a value of this key; did you mean 'none'? "
                "Allowed: none or full"
            ),
        ),
        (
            "training: {params_dtype: float16}",
            (
                "training.params_dtype: float16: storage in float16 loses small updates and overflows at "
                "65504; "
                "allowed: float32 or bfloat16 (compute_dtype may be float16)"
            ),
        ),
        ("data: {path: 12}", "data.path: 12 is a number, not text; put it in quotes"),
        ('data: {path: ""}', "data.path: is empty; allowed: text, or null"),
        (
            "model: {freeze: head.*}",
            "model.freeze: head.* is not a list; allowed: a list of texts; write [head.*]",
        ),
        ("model: {freeze: [3]}", "model.freeze[0]: 3 is a number, not text; put it in quotes"),
        (
            "optimizer: {betas: [0.9]}",
            (
                "optimizer.betas: a list of 1 is not of the right length; allowed: a list of 2, each a "
                "number "
                "of at least 0 and below 1"
            ),
        ),
        (
            "optimizer: {betas: [0.9, 1.0]}",
            "optimizer.betas[1]: 1.0 is out of range; allowed: a number of at least 0 and below 1",
        ),
        (
            "model: decoder-tiny",
            (
                "model: decoder-tiny is not a section; write keys below it (preset, vocab_size, hidden_size, "
                "num_layers, "
                "num_heads, num_kv_heads, ...), or model: {preset: decoder-tiny}"
            ),
        ),
        (
            "parallelism: {data_parallel_shard: 0}",
            (
                "parallelism.data_parallel_shard: 0 is out of range; allowed: a whole number from 1 to "
                "1048576, "
                "or -1, or null"
            ),
        ),
        (
            "launch: {timeout_seconds: 0}",
            "launch.timeout_seconds: 0 is out of range; allowed: a number above 0 and at most 2592000",
        ),
    ],
)
def test_value_says_what_is_allowed(problem, text, expected):
    assert problem(text) == f"x.yaml:1: {expected}"


def test_all_problems_come_together_in_the_order_of_the_file(problems):
    text = "training:\n  seed: -1\n  stepz: 3\nplatform: jax\noptimizer:\n  lr: 1\n  lr: 2\n"
    lines = problems(text, "training.steps=0", "a=1")
    places = [line.split(": ")[0] for line in lines]
    assert places == ["x.yaml:2", "x.yaml:3", "x.yaml:4", "x.yaml:7", "--set training.steps=0", "--set a=1"]


def test_long_values_are_shortened(problem):
    line = problem(f"platform: {'x' * 100_000}")
    assert (
        line == f"x.yaml:1: platform: {'x' * 45}... (100000 characters) is not a value of this key; allowed: "
        f"torch or mindspore"
    )


def test_many_problems_are_counted_not_printed(problems):
    lines = problems("\n".join(f"k{i}: 1" for i in range(1000)))
    assert len(lines) == 51
    assert lines[-1] == "x.yaml: and 950 more problems"


def test_section_without_keys_has_its_defaults(load):
    config = load("training:\nmodel: {}\nparallelism: null\n").config
    assert config == load("{}").config
    assert config.training.max_norm == 1.0
    assert config.training.accumulate_allreduce_grads_in_fp32 is True
    assert config.launch.timeout_seconds == 300.0


def test_a_problem_is_one_line_whatever_it_quotes():
    problem = Problem("a\nb.yaml", 3, 4, "c", "d\r\x1b[31m\udc80")
    assert str(problem) == "a\\nb.yaml:3:4: c: d\\r\\x1b[31m\\udc80"


def test_lines_and_sources_of_values_are_known(load):
    loaded = load("training:\n  steps: 3\n  seed: 1\n", "training.seed=2")
    assert loaded.lines == {"training": 1, "training.steps": 2}
    assert loaded.sources == {"training.seed": "--set training.seed=2"}
