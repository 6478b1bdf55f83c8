"""A platform of verl for the CPU, where its engines want CUDA: named by VERL_PLATFORM, loaded as an external module."""

from contextlib import nullcontext

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

# verl frees it on the ranks that get their weights from rank 0.
torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]


@PlatformRegistry.register(platform="treepack_cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "none"
    device_module = torch.cpu

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return nullcontext()

    def profiler_start(self):
        pass

    profiler_stop = profiler_start

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None
