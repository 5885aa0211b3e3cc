"""python3 tools/capture/training_extras_test.py: against torch's own, and by hand."""

import math
import unittest

import torch
import torch.nn.functional as functional

from training_extras import average_checkpoints, smoothed_cross_entropy


class SmoothedCrossEntropy(unittest.TestCase):
    def setUp(self):
        generator = torch.Generator().manual_seed(1)
        self.logits = 3 * torch.randn(50, 7, generator=generator, dtype=torch.float64)
        self.logits.requires_grad_()
        self.targets = torch.randint(7, (50,), generator=generator)

    def test_it_is_torchs(self):
        for smoothing in (0.0, 0.1, 0.5, 1.0):
            ours = smoothed_cross_entropy(self.logits, self.targets, smoothing)
            theirs = functional.cross_entropy(self.logits, self.targets, reduction="none",
                                              label_smoothing=smoothing)
            self.assertLess((ours - theirs).abs().max().item(), 1e-13)

    def test_its_gradient_is_softmax_minus_target_and_sums_to_0(self):
        smoothed_cross_entropy(self.logits, self.targets, 0.1).sum().backward()
        target = 0.9 * functional.one_hot(self.targets, 7).double() + 0.1 / 7
        expected = self.logits.detach().softmax(-1) - target
        self.assertLess((self.logits.grad - expected).abs().max().item(), 1e-13)
        self.assertLess(self.logits.grad.sum(-1).abs().max().item(), 1e-13)

    def test_its_least_value_is_the_targets_entropy(self):
        target = torch.full((1, 4), 0.1 / 4, dtype=torch.float64)
        target[0, 2] += 0.9
        loss = smoothed_cross_entropy(target.log(), torch.tensor([2]), 0.1).item()
        self.assertAlmostEqual(loss, -(target * target.log()).sum().item(), places=14)

    def test_equal_logits_cost_the_logarithm_of_the_classes(self):
        loss = smoothed_cross_entropy(torch.zeros(1, 8), torch.tensor([3]), 0.3).item()
        self.assertAlmostEqual(loss, math.log(8), places=6)


class AverageCheckpoints(unittest.TestCase):
    def test_parameters_are_means(self):
        checkpoints = [{"w": torch.tensor([1.0, 4.0])}, {"w": torch.tensor([3.0, -1.0])}]
        mean = average_checkpoints(checkpoints)
        self.assertEqual(mean["w"].tolist(), [2.0, 1.5])
        self.assertEqual(mean["w"].dtype, torch.float32)

    def test_sums_are_float64(self):
        checkpoints = [{"w": torch.tensor([x])} for x in (1e8, 1.0, -1e8)]
        self.assertEqual(average_checkpoints(checkpoints)["w"].item(), torch.tensor(1 / 3).item())


if __name__ == "__main__":
    unittest.main()
