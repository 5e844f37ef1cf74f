"""build_batch: where the rows of several requests stand."""

import torch

from engine.batch import BlockTables, RequestRows, build_batch


def batch(*rows, commits=True):
    tables = BlockTables(3, 4, torch.device("cpu"))
    tables.extend(0, [7, 5])
    tables.extend(2, [3, 9, 6])
    return build_batch(rows, tables, commits)


def test_by_hand():
    built = batch(RequestRows(2, 127, [11, 12, 13]), RequestRows(0, 64, [14]))
    assert built.token_ids.tolist() == [11, 12, 13, 14]
    assert built.positions.tolist() == [127, 128, 129, 64]
    assert built.query_starts.tolist() == [0, 3, 4]
    assert built.context_lens.tolist() == [130, 65]
    assert built.slot_mapping.tolist() == [9 * 64 + 63, 6 * 64, 6 * 64 + 1, 5 * 64]
    assert built.block_tables[0].tolist() == [3, 9, 6]
    assert built.state_slots.tolist() == [2, 0]
    assert (built.num_rows, built.last_rows, built.max_context) == ((3, 1), [2, 3], 130)


def test_a_prompt_has_nothing_to_fold_unless_rows_were_accepted():
    assert not batch(RequestRows(2, 64, [1, 2])).folds
    built = batch(RequestRows(2, 64, [1]), RequestRows(0, 3, [2], num_accepted=2), commits=False)
    assert built.folds and built.num_accepted.tolist() == [0, 2]
