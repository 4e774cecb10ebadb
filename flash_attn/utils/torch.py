"""`torch.amp.custom_fwd` and `custom_bwd` for CUDA, as decorators."""

from functools import partial

from torch.amp import autocast_mode

custom_fwd = partial(autocast_mode.custom_fwd, device_type="cuda")
custom_bwd = partial(autocast_mode.custom_bwd, device_type="cuda")
