"""Whether the cluster still runs the application of the ranks, and what it says of one that it has ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lockstep.training.control.failures import ApplicationEndedError
from lockstep.training.launch.executors import first_line

if TYPE_CHECKING:
    from pyspark import SparkContext

LOOK_S = 0.2
# Spark asks YARN every second, and stops its context a moment after that.
ENDS_S = 5.0
_ANSWERS = {  # a ResourceManager that is away is waited for 15 minutes by default
    "yarn.resourcemanager.connect.max-wait.ms": "5000",
    "yarn.resourcemanager.connect.retry-interval.ms": "1000",
}


def check_application(context: SparkContext, wait_s: float = 0.0) -> None:
    """Raise ApplicationEndedError if Spark has stopped its context, or does so within `wait_s` seconds.

    YARN ends an application that a user kills, or that a restarted ResourceManager does not know. Spark then stops the
    context, and no stage can be started in it any more.
    """
    scala, end = context._jsc.sc(), time.monotonic() + wait_s
    while not scala.isStopped():
        if time.monotonic() >= end:
            return
        time.sleep(LOOK_S)
    application = str(scala.applicationId())
    on_yarn = context.master == "yarn"
    said = _said_by_yarn(context, application) if on_yarn else "Spark has stopped its context"
    logs = f"`yarn logs -applicationId {application}` has more" if on_yarn else "Spark's log above says why"
    raise ApplicationEndedError(
        f"the application {application} of this driver has ended",
        got=said,
        allowed="an application that lasts as long as its ranks",
        next_step=f"{logs}. Start again with the same flags: a new application resumes the run.",
    )


def _said_by_yarn(context: SparkContext, application: str) -> str:
    """State and diagnostics of an application, in YARN's words; what it answers instead if it does not know it."""
    from py4j.protocol import Py4JJavaError

    jvm: Any = context._jvm
    yarn = jvm.org.apache.hadoop.yarn
    settings = yarn.conf.YarnConfiguration(context._jsc.hadoopConfiguration())
    for name, value in _ANSWERS.items():
        settings.set(name, value)
    client = yarn.client.api.YarnClient.createYarnClient()
    client.init(settings)
    client.start()
    try:
        report = client.getApplicationReport(yarn.api.records.ApplicationId.fromString(application))
        words = " ".join(str(report.getDiagnostics() or "no diagnostics").split())
        return f"YARN: {report.getYarnApplicationState()}: {words}"
    except Py4JJavaError as error:
        return f"YARN does not say why: {first_line(error)}"
    finally:
        client.stop()
