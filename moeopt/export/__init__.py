"""Files that the engines read."""

from moeopt.export.names import ENGINES, ConfigName, Engine, device_file_name, device_relatives, version_directory
from moeopt.export.read import ConfigFile, Problem, check_pair, read_config_file
from moeopt.export.write import export_configs

__all__ = [
    "ENGINES",
    "ConfigFile",
    "ConfigName",
    "Engine",
    "Problem",
    "check_pair",
    "device_file_name",
    "device_relatives",
    "export_configs",
    "read_config_file",
    "version_directory",
]
