#!/usr/bin/env bash
# Makes the environments that `make` needs. Says nothing and installs nothing where all is there.
#   scripts/setup.sh venv      .venv from requirements-dev.txt with the versions of constraints.txt, a JDK 17 or 21, and iproute2 where apt can install it
#   scripts/setup.sh airflow   .venv-airflow from requirements-airflow.txt
#   scripts/setup.sh torch     .venv-torch: PyTorch for CPUs from requirements-torch.txt, on top of .venv
#   scripts/setup.sh stores    .venv-stores: moto's S3, and Node.js, from requirements-stores.txt
#   scripts/setup.sh servers   Ceph's S3 (where apt is) and Azurite for tests of object stores, in a user cache; after venv and stores
#   scripts/setup.sh jars      the test cluster's jars
#   scripts/setup.sh kubernetes  Kubernetes' API server, scheduler, controllers and kubectl, and etcd, built by Go into the user's cache
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "error: $1" >&2
    exit 2
}

# The Python that makes the environments: $PYTHON, else the first of these names that is 3.11 or later.
find_python() {
    local name
    for name in ${PYTHON:-python3 python3.11 python3.12 python3.13 python}; do
        if command -v "$name" >/dev/null 2>&1 &&
            "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$name"
            return
        fi
    done
    fail "Python 3.11 or later with its venv module is missing; install it (Debian: apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3.11"
}

# make_venv FOLDER REQUIREMENTS FILE...: install again if any FILE has changed since the last installation. A link leads to
# the environment of another checkout, which installs it.
make_venv() {
    local folder=$1 requirements=$2 digest
    shift 2
    if [ -L "$folder" ] && [ -x "$folder/bin/python" ]; then
        return
    fi
    if command -v flock >/dev/null; then # of two makes at the same time, the second waits and finds the work done
        exec 9<"$requirements"
        flock 9
    fi
    digest=$(cat "$@" | sha256sum | cut -d' ' -f1)
    if [ "$(cat "$folder/.stamp" 2>/dev/null)" = "$digest" ] && [ -x "$folder/bin/python" ]; then
        return
    fi
    local python
    python=$(find_python)
    echo "Installing $requirements into $folder (some minutes, once) ..."
    rm -f "$folder/.stamp"
    if ! "$folder/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        "$python" -m venv --clear "$folder"
    fi
    local options=()
    if [ "$folder" = .venv ]; then
        options=(--constraint constraints.txt)
    elif [ "$folder" = .venv-torch ]; then
        options=(--no-deps)
    fi
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$requirements" "${options[@]}"
    if [ "$folder" = .venv ]; then
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
    fi
    if [ "$folder" = .venv-torch ]; then
        complete_torch
    fi
    echo "$digest" >"$folder/.stamp"
}

# .venv-torch imports what .venv has, and PyTorch without CUDA's libraries.
complete_torch() {
    local ours theirs site='import sysconfig; print(sysconfig.get_path("purelib"))'
    if [ "$(uname)" = Linux ] && ! { command -v cc && command -v readelf; } >/dev/null; then
        fail "PyTorch without CUDA needs a C compiler and readelf; install them (Debian: apt-get install gcc binutils)."
    fi
    ours=$(.venv/bin/python -c "$site")
    theirs=$(.venv-torch/bin/python -c "$site")
    echo "import site; site.addsitedir('$ours')" >"$theirs/lockstep_venv.pth"
    .venv-torch/bin/python scripts/torch_without_cuda.py "$theirs"
}

java_works() {
    local version
    version=$("$1" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p')
    [ "$version" = 17 ] || [ "$version" = 21 ]
}

# A JDK 17 or 21: JAVA_HOME, the PATH, /usr/lib/jvm. Prints its home; nothing where there is none.
find_java() {
    local home
    for home in "${JAVA_HOME:-}" "$(dirname "$(dirname "$(readlink -f "$(command -v java || echo /)")")")" /usr/lib/jvm/*; do
        if [ -n "$home" ] && [ -x "$home/bin/java" ] && java_works "$home/bin/java"; then
            echo "$home"
            return
        fi
    done
}

need_java() {
    [ -n "$(find_java)" ] && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing a JDK 17 with apt ..."
        (apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends openjdk-17-jdk-headless) >/dev/null ||
            (DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends openjdk-21-jdk-headless) >/dev/null || true
    fi
    [ -n "$(find_java)" ] || fail "Spark needs a JDK 17 or 21; install one (Debian: apt-get install openjdk-17-jdk-headless) or set JAVA_HOME."
}

# tests/network makes hosts with `ip` and `tc`; without these commands its tests are skipped, and the output says so.
want_iproute() {
    if (PATH=$PATH:/usr/sbin:/sbin && command -v ip && command -v tc) >/dev/null; then
        return
    fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing iproute2 with apt ..."
        (apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends iproute2) >/dev/null || true
    fi
}

# tests/cluster/realm.py starts a KDC of its own, for tests marked soak.
want_kerberos() {
    if (PATH=$PATH:/usr/sbin:/sbin && command -v krb5kdc && command -v kadmin.local && command -v kinit) >/dev/null; then
        return
    fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "Installing a Kerberos KDC with apt ..."
        (apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends krb5-kdc krb5-admin-server krb5-user) >/dev/null || true
    fi
}

case "${1:-}" in
venv)
    make_venv .venv requirements-dev.txt requirements.txt requirements-privacy.txt requirements-lake.txt requirements-dev.txt constraints.txt pyproject.toml
    need_java
    want_iproute
    ;;
airflow)
    make_venv .venv-airflow requirements-airflow.txt requirements-airflow.txt
    ;;
torch)
    make_venv .venv-torch requirements-torch.txt requirements-torch.txt scripts/torch_without_cuda.py
    ;;
stores)
    make_venv .venv-stores requirements-stores.txt requirements-stores.txt
    ;;
servers)
    for server in ceph azure; do # their tests are skipped where a server is not here, and the output says so
        .venv/bin/python -m "tests.object_stores.$server" || true
    done
    ;;
jars)
    .venv/bin/python -c 'from tests.cluster.jars import hadoop_jars; hadoop_jars()'
    ;;
kerberos)
    want_kerberos
    ;;
kubernetes)
    .venv/bin/python -m tests.kubernetes.binaries
    ;;
java-home)
    find_java
    ;;
*)
    fail "usage: scripts/setup.sh venv | airflow | torch | stores | servers | jars | kerberos | kubernetes | java-home"
    ;;
esac
