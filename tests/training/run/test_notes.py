"""Notes on classes call them by their names."""

from __future__ import annotations

from lockstep.training.run import notes

NAMES = ["cat", "dog"]


def test_a_note_says_the_name_of_a_class_and_its_number_without_one() -> None:
    (one_class,) = notes.of_classes([0, 9], "split `test`", NAMES)
    (far,) = notes.of_base_rates([9990, 10], [10, 990], "test", NAMES)
    assert one_class.startswith("all 9 labels of split `test` are dog, so")
    assert far.startswith("class dog is 99.00% of split `test` and 0.10% of the training data")
    assert "are 1, so" in notes.of_classes([0, 9], "split `test`")[0]
    assert notes.of_base_rates([9990, 10], [10, 990], "test")[0].startswith("class 1 is 99.00%")
