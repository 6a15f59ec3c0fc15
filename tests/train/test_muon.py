import torch

from draftree.train.muon import Muon, orthogonalize


def test_singular_values_come_near_one_and_vectors_stay():
    torch.manual_seed(0)
    for shape in ((24, 40), (40, 24), (16, 16)):
        left, _ = torch.linalg.qr(torch.randn(shape[0], shape[0]))
        right, _ = torch.linalg.qr(torch.randn(shape[1], shape[1]))
        values = torch.linspace(0.2, 3.0, min(shape))
        middle = torch.zeros(shape)
        middle.diagonal().copy_(values)
        found = left.T @ orthogonalize((left @ middle @ right)[None])[0] @ right.T
        diagonal = found.diagonal()
        assert diagonal.min() > 0.4 and diagonal.max() < 1.6
        assert (found - torch.zeros(shape).diagonal_scatter(diagonal)).abs().max() < 1e-4


def test_steps_are_those_of_torch():
    """Which computes directions in bfloat16."""
    torch.manual_seed(1)
    start, goal = torch.randn(12, 20), torch.randn(12, 20)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    options = {"lr": 0.01, "weight_decay": 0.1}
    pairs = (
        (ours, Muon([ours], **options)),
        (theirs, torch.optim.Muon([theirs], **options, adjust_lr_fn="match_rms_adamw")),
    )
    for _ in range(10):
        for weight, optimizer in pairs:
            weight.grad = None
            (weight - goal).square().sum().backward()
            optimizer.step()
    assert (ours - start).abs().max() > 0.05
    assert (ours - theirs).abs().max() < 0.005


def test_matrices_of_one_shape_step_as_each_would_alone():
    torch.manual_seed(2)
    shapes = ((12, 20), (20, 12), (12, 20), (8, 8))
    starts, slopes = ([torch.randn(shape) for shape in shapes] for _ in range(2))
    together, alone = ([torch.nn.Parameter(s.clone()) for s in starts] for _ in range(2))
    optimizers = [Muon(together, 0.01, 0.1), *(Muon([weight], 0.01, 0.1) for weight in alone)]
    for _ in range(3):
        for weight, slope in zip(together + alone, slopes + slopes, strict=True):
            weight.grad = slope.clone()
        for optimizer in optimizers:
            optimizer.step()
    for first, second in zip(together, alone, strict=True):
        assert torch.allclose(first, second, atol=1e-5)
