"""What the model predicts for clusters that are not available: `python -m benchmarks.scaling --simulate-only`."""

from __future__ import annotations

from benchmarks.shared.comm_simulation import Cluster, Layer, Workload, ethernet, simulate
from lockstep.training.comm.cost import LinkCosts

# What is simulated. Parameters by stage from the architectures; work by their multiplications (He et al. 2016; Simonyan
# and Zisserman 2015). Steps a second of a P100 at 64 images: TensorFlow's benchmark page of 2017.
RESNET50 = Workload(
    name="ResNet-50, 25.6 M parameters, 64 images in 292 ms (P100)",
    layers=tuple(
        Layer(name=name, gradient_bytes=4 * parameters, work=share)
        for name, parameters, share in (
            ("conv1", 9_536, 0.12),
            ("conv2", 215_808, 0.68),
            ("conv3", 1_219_584, 1.04),
            ("conv4", 7_098_368, 1.47),
            ("conv5", 14_964_736, 0.81),
            ("fc", 2_049_000, 0.002),
        )
    ),
    compute_s=64 / 219,
)
VGG16 = Workload(
    name="VGG-16, 138 M parameters, 64 images in 416 ms (P100)",
    layers=tuple(
        Layer(name=name, gradient_bytes=4 * parameters, work=share)
        for name, parameters, share in (
            ("conv1", 38_720, 1.94),
            ("conv2", 221_440, 2.77),
            ("conv3", 1_475_328, 4.62),
            ("conv4", 5_899_776, 4.62),
            ("conv5", 7_079_424, 1.39),
            ("fc1", 102_764_544, 0.103),
            ("fc2", 16_781_312, 0.017),
            ("fc3", 4_097_000, 0.004),
        )
    ),
    compute_s=64 / 154,
)
RESNET20 = Workload(
    name="ResNet-20, 0.27 M parameters, 64 images in 133 ms (one core)",
    layers=(Layer(name="all", gradient_bytes=4 * 274_442, work=1),),
    compute_s=64 / 480,
)
DENSE = Workload(
    name="six dense layers, 23 M parameters, 128 rows in 107 ms (one core)",
    layers=tuple(Layer(name=str(i), gradient_bytes=4 * (2048 * 2048 + 2048), work=1) for i in range(6)),
    compute_s=128 / 1190,
)
ALPHA_S = 30e-6  # between hosts, of one message, software included: assumed
INNER = LinkCosts(alpha_s=5e-6, beta_s_per_byte=1e-10, gamma_s_per_byte=2e-11)  # 10 GB/s within a host: assumed
GAMMA = 2e-11  # 50 GB/s added: assumed
PER_HOST = 4  # Horovod's hosts had four GPUs


def simulated() -> None:
    """Print efficiencies, labelled as what they are."""
    print("\nSIMULATED, nothing of this was run. Efficiency: samples/s of a rank as a share of one rank alone.")
    print(
        f"{PER_HOST} ranks a host, {ALPHA_S * 1e6:.0f} us a message, the network used wholly, no rank ever late, "
        "overlap as lockstep.training.exchange.buckets does"
    )
    print(f"{'model':<66}{'Gbit/s':>7}" + "".join(f"{n:>12} ranks" for n in (8, 64, 512, 4096)))
    for workload in (RESNET50, VGG16, RESNET20, DENSE):
        for gbit in (25, 100):
            line = f"{workload.name:<66}{gbit:>7}"
            for n in (8, 64, 512, 4096):
                outer = ethernet(gbit, alpha_s=ALPHA_S, gamma_s_per_byte=GAMMA)
                step = simulate(workload, Cluster(num_ranks=n, ranks_per_host=PER_HOST, outer=outer, inner=INNER))
                line += f"{step.efficiency:>9.0%} {step.exposed_s * 1e3:>5.0f} ms"
            print(line)
    print(
        "ms: exposed exchange a step. Published (Sergeev and Del Balso 2018, arXiv:1802.05799): 512 Pascal GPUs, 4 a\n"
        "host, 25 Gbit/s RoCE: 90 % for Inception V3 and ResNet-101, 68 % for VGG-16."
    )
