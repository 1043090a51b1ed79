"""Files that the engines read: names, writing, reading, finding, installing."""

from moeopt.export.extra_batch_sizes import (
    ExtraBatchSize,
    ExtraBatchSizes,
    InterpolatedTimes,
    find_extra_batch_sizes,
)
from moeopt.export.importer import ExistingConfigs, import_configs
from moeopt.export.install import Installed, install_configs, start_line
from moeopt.export.lookup import Lookup, find_config_files
from moeopt.export.names import ConfigName, device_relatives
from moeopt.export.read import ConfigFile, Problem, check_pair, read_config_file
from moeopt.export.write import export_configs

__all__ = [
    "ConfigFile",
    "ConfigName",
    "ExistingConfigs",
    "ExtraBatchSize",
    "ExtraBatchSizes",
    "Installed",
    "InterpolatedTimes",
    "Lookup",
    "Problem",
    "check_pair",
    "device_relatives",
    "export_configs",
    "find_config_files",
    "find_extra_batch_sizes",
    "import_configs",
    "install_configs",
    "read_config_file",
    "start_line",
]
