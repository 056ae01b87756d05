"""Ours: GradScaler, gradient accumulation, gradient clipping and a progress bar in a class, with a while loop over epochs.

No public script of a fitting licence was found that has a GradScaler and accumulation and runs on a CPU.
"""

import argparse

import torch
import torch.utils.data as D
from torch import nn
from tqdm import tqdm


class Trainer:
    def __init__(self, model, loader, validation, args):
        self.model = model
        self.loader = loader
        self.validation = validation
        self.args = args
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        self.best = float("inf")

    def train_epoch(self):
        self.model.train()
        running = 0.0
        for step, (inputs, targets) in enumerate(tqdm(self.loader)):
            with torch.autocast("cpu", enabled=False):
                loss = nn.functional.cross_entropy(self.model(inputs), targets) / self.args.accumulate
            self.scaler.scale(loss).backward()
            running += loss.item() * self.args.accumulate
            if (step + 1) % self.args.accumulate == 0 or step + 1 == len(self.loader):
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
        return running / len(self.loader)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        total = 0.0
        for inputs, targets in self.validation:
            total += nn.functional.cross_entropy(self.model(inputs), targets, reduction="sum").item()
        return total / len(self.validation.dataset)

    def fit(self):
        epoch = 0
        while epoch < self.args.epochs:
            train_loss = self.train_epoch()
            valid_loss = self.evaluate()
            self.scheduler.step(valid_loss)
            print(f"epoch {epoch}: train {train_loss:.6f} valid {valid_loss:.6f}")
            if valid_loss < self.best:
                self.best = valid_loss
                torch.save({"model": self.model.state_dict(), "epoch": epoch}, "best.pt")
            elif valid_loss > 2 * self.best:
                break
            epoch += 1


def make_data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=generator)
    return D.TensorDataset(inputs, (inputs.sum(1) > 0).long())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.5)
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = D.DataLoader(make_data(72, 1), args.batch_size, True)
    validation = D.DataLoader(make_data(32, 2), args.batch_size)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    model = model.to("cuda:0" if torch.cuda.is_available() else "cpu")
    Trainer(model, loader, validation, args).fit()


if __name__ == "__main__":
    main()
