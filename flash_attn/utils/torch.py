"""`torch.amp.custom_fwd` and `custom_bwd` for CUDA, as decorators."""

from functools import partial

import torch

custom_fwd = partial(torch.amp.custom_fwd, device_type="cuda")
custom_bwd = partial(torch.amp.custom_bwd, device_type="cuda")
