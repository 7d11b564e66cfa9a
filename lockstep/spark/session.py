"""The Spark session of a job: settings that results depend on, and our code shipped to the executors."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.process.installed import ROOT, python_files
from lockstep.process.own_code import CodeFolder
from lockstep.process.signals import ended_in_order
from lockstep.spark.java_signals import signals_of_java
from lockstep.storage import tokens
from lockstep.storage.errors import ConfigError, LockstepError, require

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

# Checked here, since Spark reports an unknown master by a Java stack trace that looks as if Java could not start.
_MASTER = re.compile(
    r"local(\[(\*|[1-9][0-9]{0,3})(\s*,\s*[0-9]+)?\])?|local-cluster\[[0-9, ]+\]|yarn|(spark|k8s)://.+"
)
LOG4J = Path(__file__).with_name("log4j2.properties")
PACKAGE_LISTS = ("requirements.txt", "constraints.txt")  # which lockstep doctor compares with what is installed

PINNED = {
    # A Python worker of a local master starts in this process' folder, whose modules are not to hide ours or Python's.
    "spark.executorEnv.PYTHONSAFEPATH": "1",
    # Java's serializer keeps all that it wrote since its last reset: by default 100 batches of cached rows, MiB each,
    # for each task that spills its cache to disk. 4 million rows exhausted a heap of 1 GiB.
    "spark.serializer.objectStreamReset": "1",
    # Results must not depend on the machine's locale or time zone, and a failed cast must raise.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.ansi.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}


SHORT_JOB_BYTES = 128 << 20
FOR_RANKS = ("fs.", "dfs.", "hadoop.security.authentication", "hadoop.rpc.protection", "lockstep.storage.")


def ship_rooms(folder: str) -> str:
    """Zip our Python files into `folder` for the executors; returns the zip's path. Equal files make equal bytes.

    A driver that runs from such a zip, as in YARN's cluster mode, ships that zip.
    """
    if ROOT.is_file():
        return str(ROOT)
    target = os.path.join(folder, "lockstep.zip")
    lists = [path for name in PACKAGE_LISTS if (path := ROOT / name).is_file()]
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in [*((path.name, path) for path in lists), *python_files()]:
            entry = zipfile.ZipInfo(name)  # of the year 1980
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return target


def java_options(environment: MutableMapping[str, str], *, short: bool) -> None:
    """Set options of the Java process that this one will start, unless the user has set them.

    For a `short` session only Java's quick compiler: there the optimising one costs more time than it saves (decision
    063). And our log4j2 file, which hides Spark's messages at each start; a user's file in the configuration folder, or
    by a Java option, wins.
    """
    home = environment.get("SPARK_HOME")
    folder = environment.get("SPARK_CONF_DIR") or (home and os.path.join(home, "conf"))
    options = environment.get("SPARK_SUBMIT_OPTS", "")
    more = [options] if options else []
    if short and "TieredStopAtLevel" not in options:
        more.append("-XX:TieredStopAtLevel=1")
    if not (folder is not None and any(Path(folder).glob("log4j2*"))) and "log4j" not in options and LOG4J.is_file():
        # spark-submit puts these before spark.driver.extraJavaOptions; of two with one name, Java takes the last.
        more.append(f"-Dlog4j2.configurationFile={LOG4J.as_uri()}")
    environment["SPARK_SUBMIT_OPTS"] = " ".join(more)


def spark_session(
    app_name: str, master: str | None = None, *, input_bytes: int | None = None, code: CodeFolder | None = None
) -> SparkSession:
    """A session with pinned settings: `stop`, or the end of a `with` block, ends it and all that it has changed.

    `input_bytes` is what a session of one job will read, if it is known: up to SHORT_JOB_BYTES, Java compiles for a
    short life. The master is `master` if given, else that of spark-submit, else `local[*]`. `code` are the user's own
    modules, which executors can import too. Raises ConfigError for a master that Spark does not know, and if Java
    cannot be started.
    """
    if master is not None:
        allowed = "local, local[N], local[*], yarn, spark://HOST:PORT, k8s://URL"
        next_step = "Correct --master; leave it out for spark-submit's, or local[*]."
        require(bool(_MASTER.fullmatch(master)), "--master", master, allowed, next_step)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    from lockstep.spark.own_session import OwnSession, running

    if (session := running()) is not None:  # such as that of a notebook's cell which runs again
        return session
    with ExitStack() as stack:
        spark = _started(stack, app_name, master, input_bytes, code)
        return OwnSession.of(spark, stack.pop_all())


def _started(
    stack: ExitStack, app_name: str, master: str | None, input_bytes: int | None, code: CodeFolder | None
) -> SparkSession:
    """Start a session, whose end goes onto the stack."""
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    # Set by spark-submit's Java, which started this process: on this host, or as YARN's application master.
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    # Where Java runs already, as after lockstep doctor has asked YARN, its settings are those of spark-submit.
    conf = SparkConf(loadDefaults=submitted).setAppName(app_name).setAll(list(PINNED.items()))
    if not submitted:
        java_options(os.environ, short=input_bytes is not None and input_bytes <= SHORT_JOB_BYTES)
    if master is not None or not submitted:
        conf.setMaster(master or "local[*]")
    stack.enter_context(ended_in_order())
    stack.enter_context(_end_unhidden())
    logging.getLogger().addFilter(_is_no_trace_of_ctrl_c)  # the same one in each session: it is added once
    with _start_explained():
        # Before the context, which takes seconds: a signal to Java in between would end it in the middle.
        SparkContext._ensure_initialized(conf=conf)
        stack.enter_context(signals_of_java(SparkContext._gateway))
        interrupt = signal.getsignal(signal.SIGINT)
        SparkContext.getOrCreate(conf)
        if threading.current_thread() is threading.main_thread() and interrupt is not None:
            # Spark's handler of Ctrl-C calls Java in the middle of another call, which prints traces.
            signal.signal(signal.SIGINT, interrupt)
        spark = SparkSession.builder.config(conf=conf).getOrCreate()
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-"))
    stack.callback(stop_session, spark)
    spark.sparkContext.setLogLevel("ERROR")
    _leave_no_answer_behind(spark)
    path = list(sys.path)
    own = os.path.join(folder, "lockstep-own-code.zip")
    if code is not None and code.pack(own):
        spark.sparkContext.addPyFile(own)
    spark.sparkContext.addPyFile(ship_rooms(folder))  # the last is the first on the executors' path
    # Spark puts its copies first here, and deletes them with the session; this process has our code already.
    sys.path[:] = path
    return spark


@contextmanager
def _start_explained() -> Iterator[None]:
    """Raise ConfigError where Java cannot be started, or refuses the settings."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkRuntimeError

    try:
        yield
    except PySparkRuntimeError as error:
        raise ConfigError(
            "Spark cannot start its Java process",
            got=str(error).splitlines()[0],
            allowed="a JDK 17 or 21 on the PATH or in JAVA_HOME",
            next_step="Run `lockstep doctor`.",
        ) from error
    except Py4JJavaError as error:
        reason = str(error.java_exception).splitlines()[0]
        if "IllegalArgumentException" not in reason:
            raise
        raise ConfigError(
            "Spark refuses its settings",
            got=reason.partition(": ")[2][:500],
            allowed="settings that go together: encryption, for one, needs spark.authenticate=true",
            next_step="Correct spark-submit's --conf or spark-defaults.conf; docs/security.md has those of --tls on.",
        ) from None


def _end_asked(error: BaseException | None) -> BaseException | None:
    """The SystemExit or KeyboardInterrupt of a signal that `error` is, or has hidden; None for any other error."""
    while error is not None and not isinstance(error, SystemExit | KeyboardInterrupt):
        error = error.__context__
    return error


@contextmanager
def _end_unhidden() -> Iterator[None]:
    """Raise the end that a signal asked for where what is then ended, without Java perhaps, fails by another error.

    A Java process that is still starting is killed: it would wait for ever, since pyspark has removed the folder to
    which it writes its port.
    """
    import psutil
    from pyspark import SparkContext

    try:
        yield
    except BaseException as error:
        if (end := _end_asked(error)) is None:
            raise
        if SparkContext._gateway is None:
            for child in psutil.Process().children():
                with suppress(psutil.Error):  # it has ended
                    if "pyspark-shell" in child.cmdline():
                        child.kill()
        raise end from None


def _leave_no_answer_behind(spark: SparkSession) -> None:
    """Let this thread talk to Java over a new connection after a signal in the middle of a call. On the old one py4j
    would take the answer to that call for the answer to the next, and the job would end with a strange error of Java.
    """
    gateway = spark.sparkContext._gateway
    assert gateway is not None, "a context has one"
    client = gateway._gateway_client
    # An earlier session of this process has done it; or threads share connections (PYSPARK_PIN_THREAD=false), and py4j
    # takes none again in the middle of a call.
    if "send_command" in vars(client) or not hasattr(client, "thread_connection"):
        return
    send = client.send_command

    def send_command(*arguments: Any, **options: Any) -> Any:
        try:
            return send(*arguments, **options)
        except (KeyboardInterrupt, SystemExit):
            client.thread_connection.connection = None
            raise

    client.send_command = send_command


def _is_no_trace_of_ctrl_c(record: logging.LogRecord) -> bool:
    """Drops what py4j logs of each Ctrl-C in the middle of a call of Java."""
    return record.msg != "KeyboardInterrupt while sending command."


def stop_session(spark: SparkSession) -> None:
    """Stop the session; that its Java process has ended is no error, which would hide that of the caller."""
    from py4j.protocol import Py4JError

    cause = sys.exc_info()[1]
    signalled = _end_asked(cause) is not None
    try:
        # Our errors say why, a signal needs no reason; Spark would print traces of lost executors and of its own end.
        if signalled or isinstance(cause, LockstepError):
            spark.sparkContext.setLogLevel("OFF")
        with _java_silent(spark) if signalled else nullcontext():
            spark.stop()
    except (OSError, Py4JError) as error:
        level = logging.DEBUG if signalled else logging.WARNING
        first = next(iter(str(error).splitlines()), "")
        log.log(level, "Spark's Java process had ended before its session: %s", first)


@contextmanager
def _java_silent(spark: SparkSession) -> Iterator[None]:
    """Drop what Java prints past its log: Scala prints the traces of work that it cannot start any more."""
    jvm: Any = spark.sparkContext._jvm
    stderr = jvm.java.lang.System.err
    jvm.java.lang.System.setErr(jvm.java.io.PrintStream(jvm.java.io.OutputStream.nullOutputStream()))
    try:
        yield
    finally:
        jvm.java.lang.System.setErr(stderr)


def hadoop_settings_of(spark: SparkSession) -> dict[str, str]:
    """The driver's effective fs.*, dfs.* and Hadoop's security settings, with which ranks reach the same HDFS.

    From now on this process also holds the session's delegation tokens, and new ones as Spark fetches them.
    """
    context = spark.sparkContext._jsc  # pyspark has no public accessor for the Hadoop configuration
    if context is None:
        raise LockstepError(
            "this session has no JVM",
            got="Spark Connect",
            allowed="a classic session: over Spark Connect there is no SparkContext",
            next_step="Start the job with spark-submit or --master.",
        )
    tokens.follow(spark.sparkContext._jvm, lambda: spark.sparkContext._jsc is not None)
    entries = context.hadoopConfiguration().iterator()
    found: dict[str, str] = {}
    while entries.hasNext():
        entry = entries.next()
        if str(entry.getKey()).startswith(FOR_RANKS):
            found[str(entry.getKey())] = str(entry.getValue())
    return found
