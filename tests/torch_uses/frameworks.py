"""Training through Lightning Fabric and Accelerate."""

from __future__ import annotations

import importlib
import importlib.util

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from torch_uses import bits, close_parameters, joined_batch, know, perceptron, regression, trained_alone, use, world


@use(timeout_s=120)
def lightning_fabric(backend: str) -> object:
    """Fabric with DDPStrategy(process_group_backend=...): loader, model, optimizer; equals one process."""
    know(backend)
    package = "lightning.fabric" if importlib.util.find_spec("lightning") else "lightning_fabric"
    fabric_module = importlib.import_module(package)
    strategies = importlib.import_module(f"{package}.strategies")
    strategy = strategies.DDPStrategy(process_group_backend=backend)
    fabric = fabric_module.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    assert dist.get_backend() == backend
    model = perceptron()
    model, stepper = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(_loader(fabric.world_size, batch_size=8))
    for x_BF, y_BO in loader:
        stepper.zero_grad()
        fabric.backward(regression(model, x_BF, y_BO))
        stepper.step()
    losses = fabric.all_gather(torch.tensor(float(fabric.global_rank)))
    assert losses.tolist() == [0.0, 1.0]
    parameters = {name.removeprefix("_forward_module.module."): p for name, p in model.module.named_parameters()}
    close_parameters(parameters, trained_alone(_STEPS, fabric.world_size))
    fabric.barrier()
    dist.destroy_process_group()
    return bits(*parameters.values())


@use(timeout_s=120)
def accelerate(backend: str) -> object:
    """Accelerator over a group that the script has made: prepare, backward, gather.

    On a CPU, Accelerate accepts no backend but gloo and mpi from its own arguments (PartialState._prepare_backend, 1.15);
    it uses a group that is already there, so the script calls init_process_group first.
    """
    from accelerate import Accelerator

    with world(backend) as (rank, size):
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == size
        assert dist.get_backend() == backend
        model = perceptron()
        stepper = torch.optim.SGD(model.parameters(), lr=0.1)
        model, stepper, loader = accelerator.prepare(model, stepper, _loader(size, batch_size=8))
        for x_BF, y_BO in loader:
            stepper.zero_grad()
            accelerator.backward(regression(model, x_BF, y_BO))
            stepper.step()
        everyone = accelerator.gather(torch.tensor([float(rank)]))
        assert everyone.tolist() == [float(r) for r in range(size)]
        accelerator.wait_for_everyone()
        parameters = dict(accelerator.unwrap_model(model).named_parameters())
        close_parameters(parameters, trained_alone(_STEPS, size))
        return bits(*parameters.values())


def _loader(world_size: int, *, batch_size: int) -> DataLoader:
    """A loader over all ranks' rows in an order such that the frameworks' samplers give each step the rows of `joined_batch`.

    Fabric's sampler deals rows out one by one and Accelerate's deals whole batches; a mean over the joined batch does not
    depend on which rank holds which row.
    """
    parts = [joined_batch(step, world_size) for step in range(_STEPS)]
    rows = TensorDataset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
    return DataLoader(rows, batch_size=batch_size, shuffle=False)


_STEPS = 3
