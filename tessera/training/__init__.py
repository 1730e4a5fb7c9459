"""The whole training step as one program: forward, loss, backward, clipping and the optimizer's update."""

from tessera.training.step import train_step

__all__ = ["train_step"]
