"""Empty stand-ins for packages that a library imports and the functions called here never use."""

import importlib.machinery
import sys
import types


class _Anything:
    """Whatever is asked of it: an attribute, a decorator, a base class, a type in a union."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args, **kwargs):
        return args[0] if args and callable(args[0]) else _Anything()

    def __mro_entries__(self, bases):
        return (object,)

    def __or__(self, other):
        return self

    __ror__ = __or__


def _attribute(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything()


class _Finder:
    def __init__(self, packages):
        self.packages = frozenset(packages)

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__, module.__path__, module.__version__ = _attribute, [], "99.0"
        return module

    def exec_module(self, module):
        pass


def stub(*packages):
    """Let ``import package`` and ``from package.any.module import anything`` succeed for these packages."""
    sys.meta_path.insert(0, _Finder(packages))


def bare_package(name, folder):
    """A package that knows its folder but has not run its ``__init__``."""
    module = types.ModuleType(name)
    module.__path__, module.__package__ = [str(folder)], name
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__spec__.submodule_search_locations = module.__path__
    sys.modules[name] = module
