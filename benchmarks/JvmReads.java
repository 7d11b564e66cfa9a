import java.io.BufferedOutputStream;
import java.io.FileInputStream;
import java.io.PrintStream;
import java.util.Map;
import java.util.TreeMap;
import org.tensorflow.example.Example;
import org.tensorflow.example.Feature;
import org.tensorflow.hadoop.util.TFRecordReader;

/** Prints each record of a TFRecord file, checksums checked, as benchmarks/jvm_reads.py expects it. */
public class JvmReads {
    public static void main(String[] args) throws Exception {
        PrintStream out = new PrintStream(new BufferedOutputStream(System.out), false, "UTF-8");
        try (FileInputStream file = new FileInputStream(args[0])) {
            TFRecordReader reader = new TFRecordReader(file, true);
            for (byte[] record = reader.read(); record != null; record = reader.read()) {
                StringBuilder line = new StringBuilder();
                new TreeMap<>(Example.parseFrom(record).getFeatures().getFeatureMap()).forEach(
                    (name, feature) -> line.append(name).append('=').append(told(feature)).append(';'));
                out.println(line);
            }
        }
        out.flush();
    }

    private static String told(Feature feature) {
        StringBuilder text = new StringBuilder();
        switch (feature.getKindCase()) {
            case INT64_LIST:
                text.append('i');
                feature.getInt64List().getValueList().forEach(value -> text.append(' ').append(value));
                break;
            case FLOAT_LIST:
                text.append('f');
                feature.getFloatList().getValueList().forEach(
                    value -> text.append(' ').append(Integer.toHexString(Float.floatToRawIntBits(value))));
                break;
            case BYTES_LIST:
                text.append('b');
                feature.getBytesList().getValueList().forEach(value -> {
                    text.append(" x");
                    for (byte one : value.toByteArray()) {
                        text.append(String.format("%02x", one));
                    }
                });
                break;
            default:
                text.append("none");
        }
        return text.toString();
    }
}
