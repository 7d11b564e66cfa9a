#!/bin/bash
# The first process of each pod. Spark gives it `driver` with arguments of spark-submit, or `executor` with all else in
# the environment; any other word is a command to run, such as `spark-submit` or `lockstep`.
set -euo pipefail

case "${1:-}" in
driver)
    shift
    command=("$SPARK_HOME/bin/spark-submit" --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS"
        --deploy-mode client "$@")
    ;;
executor)
    options=()
    while IFS= read -r name; do
        options+=("${!name}")
    done < <(compgen -v | grep '^SPARK_JAVA_OPT_' | sort -t_ -k4 -n)
    command=("$JAVA_HOME/bin/java" "${options[@]}" "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY"
        -cp "$SPARK_HOME/conf:${SPARK_CLASSPATH:-}:$SPARK_HOME/jars/*"
        org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend
        --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" --cores "$SPARK_EXECUTOR_CORES"
        --app-id "$SPARK_APPLICATION_ID" --hostname "$SPARK_EXECUTOR_POD_IP"
        --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" --podName "$SPARK_EXECUTOR_POD_NAME")
    ;;
*)
    command=("$@")
    ;;
esac

# This shell stays the first process: it passes SIGTERM on, and takes processes over whose parents have ended.
"${command[@]}" &
child=$!
trap 'kill -TERM "$child" 2>/dev/null || true' TERM
code=0
while true; do
    wait "$child" && code=0 || code=$?
    kill -0 "$child" 2>/dev/null || exit "$code"
done
