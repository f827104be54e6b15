"""The look of pictures."""

from cs336_systems.figures import new_figure, save_figure


def _height_px(path) -> int:
    return int.from_bytes(path.read_bytes()[20:24])  # of a PNG's header


def test_a_label_longer_than_its_axis_is_not_cut(tmp_path):
    for name, label in (("short", "ms"), ("long", "a median of milliseconds of " * 4)):
        figure, axes = new_figure()
        axes[0][0].set_ylabel(label)
        save_figure(figure, tmp_path / f"{name}.png")
    # At ten points a letter is at least four high, of 72 an inch and 130 pixels.
    assert _height_px(tmp_path / "long.png") > 4 * 110 / 72 * 130
    assert _height_px(tmp_path / "short.png") < 3.5 * 130
