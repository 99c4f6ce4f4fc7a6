"""The command line as a function, and where subprocesses find flexsearch."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import flexsearch
from flexsearch.cli import streams as command_streams
from tests.costs import COSTS_S, name_of, shares

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a shell runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything loads OpenMP; processes that tests start inherit it. Workers share the cores, and threads that wait
# for each other kept other workers from theirs: the suite took 1.4 times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SOURCE = str(Path(flexsearch.__file__).resolve().parent.parent)


@dataclass(frozen=True)
class Ran:
    """How a command ended: exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """Stdout as the one JSON object that it must be."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Cli = Callable[..., Ran]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-models", action="store_true", help="Every model of families.py and own_models.py.")


@pytest.fixture(autouse=True, scope="module")
def _collector_leaves_what_other_files_hold() -> Iterator[None]:
    """Imported models and compiled code stay for the whole run, millions of objects. To look through them all again and
    again took the garbage collector a fifth of the time of tests that import models."""
    gc.set_threshold(20_000, 20, 20)
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _subprocesses_find_flexsearch() -> Iterator[None]:
    """A process started in another folder imports the flexsearch under test, installed or not."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, before]))
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@contextmanager
def streams_restored() -> Iterator[None]:
    """What a command does to the standard streams, the path and the signals of its process, undone."""
    streams, path, descriptor = (sys.stdout, sys.stderr), list(sys.path), os.dup(1)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        sys.path[:] = path
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.dup2(descriptor, 1)
        os.close(descriptor)
        if command_streams._result is not None:  # a process that ends does not need to
            os.close(command_streams._result.fileno())
            command_streams._result = None


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """``cli("optimize", "lenet", ...)`` in an empty folder."""
    from flexsearch.cli import main

    monkeypatch.chdir(tmp_path)

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["flexsearch", *map(str, arguments)])
        capfd.readouterr()
        with streams_restored(), pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        return Ran(int(end.value.code or 0), out, err)

    return call


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, and beside it a console script and a log of the Python processes that are started."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "flexsearch").write_text("from flexsearch.cli import main\nmain()\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        f"import sys\nwith open({str(tmp_path / 'started')!r}, 'a') as log:\n    print(sys.orig_argv, file=log)\n"
    )
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return here


EVERY_THIRD = frozenset({
    "test_any_split_gives_the_gradients_of_one_device", "test_every_kind_has_samples_that_give_it",
    "test_hosts_launch_ahead_and_a_proposal_gives_the_times_of_the_definition",
    "test_mistakes_end_with_2_and_the_remedy", "test_no_plan_with_stages_and_microbatches_is_faster",
    "test_the_others_are_told_of_a_rank_lost_in_mid_step",
    "test_any_number_of_processes_gives_the_same_plan", "test_layers_of_transformers_train_in_parts",
    "test_pieces_add_up_to_what_pytorch_computes",
    "test_a_walk_of_proposals_gives_the_times_of_the_definition",
    "test_a_folded_plan_takes_as_long_as_the_whole_one", "test_a_model_of_images_is_split_exactly",
    "test_a_plan_computes_what_eager_pytorch_computes",
    "test_a_resized_graph_is_that_of_the_model_imported_at_that_size",
    "test_a_score_that_is_only_added_to_stays_one_attention",
    "test_a_signal_at_any_moment_leaves_a_plan_or_says_that_there_is_none",
    "test_a_signal_ends_the_search_with_the_best_plan_so_far",
    "test_a_stream_that_fails_ends_nothing_but_the_printing", "test_an_error_is_one_json_object_too",
    "test_any_encoding_will_do", "test_any_strategy_computes_what_one_device_does", "test_any_width_will_do",
    "test_commands_keep_to_the_width_and_break_no_word_into_fragments",
    "test_every_baseline_is_legal_for_recurrent_networks", "test_every_baseline_is_legal_on_any_number_of_devices",
    "test_every_baseline_is_legal_on_the_shipped_graphs", "test_every_picture_is_drawn_in_every_format",
    "test_every_plan_computes_what_plain_pytorch_computes",
    "test_every_predicted_task_and_pass_is_measured_once_under_its_name", "test_every_span_is_that_of_the_definition",
    "test_experts_of_transformers_compute_the_same_token_by_token", "test_graphs_of_small_models",
    "test_graphs_of_the_zoo", "test_it_computes_what_pytorch_defines", "test_models_export_in_training_mode",
    "test_mutated_files_are_refused_or_answered_sanely", "test_no_command_imports_from_the_current_folder",
    "test_nor_a_baseline_nor_a_plan_that_a_search_found",
    "test_passes_follow_each_other_in_the_order_of_the_schedule",
    "test_predictions_and_smaller_batches_are_those_of_one_device", "test_random_draws_do_not_depend_on_the_plan",
    "test_small_models", "test_the_account_of_a_walk_is_that_of_the_plan",
    "test_the_account_of_any_walk_is_that_of_the_plan", "test_the_batch_is_what_a_plan_is_fed",
    "test_the_figures_that_made_simulated_times_come_back",
    "test_the_hash_is_the_same_on_every_call_process_and_device",
    "test_the_products_of_a_step_are_those_that_torch_counts",
    "test_the_tasks_of_a_folded_plan_move_what_those_of_the_whole_one_move", "test_the_zoo",
    "test_the_zoo_computes_the_same_as_a_graph", "test_what_goes_past_inputs_and_outputs_is_traced_as_it_is",
    "test_what_is_only_put_off_is_skipped_and_the_times_are_the_same",
    "test_what_no_kind_knows_pytorch_writes_with_what_one_does",
})  # fmt: skip
EVERY_FIFTH = frozenset({
    "test_a_call_is_written_with_other_operators_that_add_up", "test_a_changed_file_is_refused_or_runs",
    "test_a_changed_operator_is_refused_or_computed", "test_a_file_that_contradicts_itself_is_refused",
    "test_a_form_gives_what_pytorch_gives_in_any_pieces",
    "test_a_walk_of_proposals_is_simulated_as_the_whole_plans_are",
    "test_an_operator_has_the_expected_pattern_and_computes_the_same",
    "test_gradient_checkpointing_imports_to_the_same_graph_with_a_note",
    "test_its_graph_can_be_saved_counted_and_told", "test_pieces_add_up_to_the_whole_and_to_plain_torch",
    "test_pipelines_of_hugging_face_models_train_as_the_model_does",
    "test_random_stages_and_microbatches_run_as_defined", "test_rows_are_those_of_the_definition",
    "test_shipped_graphs_are_what_the_code_makes", "test_shipped_graphs_come_back_from_both_formats",
})  # fmt: skip
"""Tests over long lists of cases, each of which takes seconds. Only every third or fifth case runs, so that the whole
suite takes less than 20 minutes on two cores, slow ones too; with FLEXSEARCH_ALL_TESTS=1 all run."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out most cases of ``EVERY_THIRD`` and ``EVERY_FIFTH``; note the share of time before each test."""
    if os.environ.get("FLEXSEARCH_ALL_TESTS"):
        return
    seen: Counter[str] = Counter()
    left_out: set[pytest.Item] = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        name = name_of(item)
        every = 3 if name in EVERY_THIRD else 5 if name in EVERY_FIFTH else 1
        if seen[test] % every:
            left_out.add(item)
        seen[test] += 1
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    SHARES.update(shares(items))


BEGAN = time.monotonic()
LEAST_S, ENOUGH_S = 120.0, 690.0
"""On a machine on which all would take longer than ``ENOUGH_S``, tests that take long are left out until they would
not; none in the first ``LEAST_S``."""
SHARES: dict[str, float] = {}
"""What share of the whole time should have passed before each test."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.environ.get("FLEXSEARCH_ALL_TESTS") or name_of(item) not in COSTS_S:
        return
    passed_s = time.monotonic() - BEGAN
    if passed_s > LEAST_S and passed_s > ENOUGH_S * SHARES[item.nodeid]:
        pytest.skip("slow machine: the tests would take more than 11.5 minutes (FLEXSEARCH_ALL_TESTS=1 runs them all)")
