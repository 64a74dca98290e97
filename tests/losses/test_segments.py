import numpy as np
import pytest
import torch

from nemo_opd.losses.sparse_projection import Segments

LENGTHS = {
    "mixed": [3, 0, 1, 17, 2, 4, 5, 8, 9, 1, 0, 40],
    "one": [7],
    "empty": [0, 0],
    "none": [],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_sums_and_maxima_equal_a_loop_over_the_segments(lengths):
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int64)
    segments = Segments.of(offsets)
    entries = torch.randn(3, offsets[-1], dtype=torch.float64)

    def laid_out(padding: float) -> torch.Tensor:
        return torch.cat([entries, torch.full((3, 1), padding, dtype=torch.float64)], 1)[:, segments.entries]

    parts = [entries[:, offsets[i] : offsets[i + 1]] for i in segments.order.tolist()]
    assert sorted(segments.order.tolist()) == list(range(len(lengths)))
    for i, part in enumerate(parts):
        torch.testing.assert_close(segments.sum(laid_out(0))[:, i], part.sum(1), rtol=1e-14, atol=1e-14)
        largest = part.amax(1) if part.shape[1] else torch.full((3,), -torch.inf, dtype=torch.float64)
        assert torch.equal(segments.max(laid_out(-torch.inf))[:, i], largest)


def test_padding_less_than_doubles_the_cells_and_short_segments_have_none():
    lengths = np.arange(5, 200)
    segments = Segments.of(np.append(0, np.cumsum(lengths)))
    assert len(segments.entries) - 1 < 2 * lengths.sum()
    assert (Segments.of(np.arange(0, 41, 4)).entries[:-1] >= 0).all()


def test_the_views_of_each_group_are_of_its_own_segments():
    segments = Segments.of(np.array([0, 2, 12, 13, 15]))
    cells = torch.zeros(2, len(segments.entries))
    for own, number in segments.each(cells, segments.order.float().expand(2, -1)):
        own.add_(number.unsqueeze(1))
    segment_of_entry = np.repeat([0, 1, 2, 3], [2, 10, 1, 2])
    held = segments.entries >= 0
    assert torch.equal(cells[:, held], torch.from_numpy(segment_of_entry)[segments.entries[held]].float().expand(2, -1))
