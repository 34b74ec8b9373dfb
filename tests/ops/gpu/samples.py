"""Small outputs of NVIDIA's tools, written for these tests in the tools' own forms."""

QUERY = """
==============NVSMI LOG==============

Driver Version                            : 550.54.15
CUDA Version                              : 12.4

Attached GPUs                             : 1
GPU 00000000:3B:00.0
    Product Name                          : NVIDIA A100-SXM4-40GB
    Product Architecture                  : Ampere
    MIG Mode
        Current                           : Disabled
        Pending                           : Disabled
    GPU UUID                              : GPU-aaaa
    PCI
        GPU Link Info
            PCIe Generation
                Max                       : 4
                Current                   : 4
            Link Width
                Max                       : 16x
                Current                   : 8x
    Clocks Event Reasons
        HW Slowdown                       : Not Active
            HW Thermal Slowdown           : Active
        SW Thermal Slowdown               : Not Active
    FB Memory Usage
        Total                             : 40960 MiB
        Used                              : 512 MiB
    Ecc Mode
        Current                           : Enabled
    ECC Errors
        Volatile
            SRAM Correctable              : 0
            SRAM Uncorrectable            : 0
            DRAM Correctable              : 12
            DRAM Uncorrectable            : 2
        Aggregate
            SRAM Uncorrectable            : 0
            DRAM Uncorrectable            : 3
    Remapped Rows
        Correctable Error                 : 0
        Uncorrectable Error               : 1
        Pending                           : No
        Remapping Failure Occurred        : No
        Bank Remap Availability Histogram
            Max                           : 639 bank(s)
            Low                           : 1 bank(s)
            None                          : 0 bank(s)
    Processes
        GPU instance ID                   : N/A
        Process ID                        : 11
            Type                          : C
            Name                          : /usr/bin/python3
            Used GPU Memory               : 300 MiB
        Process ID                        : 12
            Type                          : G
            Name                          : /usr/lib/xorg/Xorg
            Used GPU Memory               : 4 MiB
"""
XML = """<?xml version="1.0" ?>
<nvidia_smi_log>
  <driver_version>550.54.15</driver_version>
  <cuda_version>12.4</cuda_version>
  <attached_gpus>2</attached_gpus>
  <gpu id="00000000:3B:00.0">
    <product_name>NVIDIA A100-SXM4-40GB</product_name>
    <uuid>GPU-aaaa</uuid>
    <mig_mode><current_mig>Disabled</current_mig><pending_mig>Enabled</pending_mig></mig_mode>
    <fb_memory_usage><total>40960 MiB</total><used>3 MiB</used></fb_memory_usage>
    <processes>
      <process_info>
        <pid>77</pid><type>C</type><process_name>a &amp; b</process_name>
        <used_memory>2 MiB</used_memory>
      </process_info>
    </processes>
  </gpu>
  <gpu id="00000000:86:00.0">
    <product_name>NVIDIA A100-SXM4-40GB</product_name>
    <uuid>GPU-bbbb</uuid>
    <fb_memory_usage><total>40960 MiB</total><used>3 MiB</used></fb_memory_usage>
    <retired_pages>
      <double_bit_retirement><retired_count>2</retired_count></double_bit_retirement>
      <pending_retirement>Yes</pending_retirement>
    </retired_pages>
  </gpu>
</nvidia_smi_log>
"""
CSV = """name, index, uuid, memory.total [MiB], memory.used [MiB], ecc.mode.current, fan.speed [%]
NVIDIA A100-SXM4-40GB, 0, GPU-aaaa, 40960 MiB, 3 MiB, Enabled, [N/A]
NVIDIA A100-SXM4-40GB, 1, GPU-bbbb, 40960 MiB, [Unknown Error], Enabled, [Not Supported]
"""
TABLE = """\
+---------------------------------------------------------------------------------------+
| NVIDIA-SMI 535.54.03              Driver Version: 535.54.03    CUDA Version: 12.2     |
|-----------------------------------------+----------------------+----------------------+
|   0  NVIDIA A100-SXM4-40GB          On  | 00000000:3B:00.0 Off |                    0 |
| N/A   31C    P0              60W / 400W |      3MiB / 40960MiB |    100%      Default |
|                                         |                      |             Disabled |
+-----------------------------------------+----------------------+----------------------+
|   1  ERR!                          ERR! | 00000000:86:00.0 ERR!|                 ERR! |
|ERR!  ERR! ERR!             ERR! / ERR!  |     ERR! /  40960MiB |     ERR!        ERR! |
|                                         |                      |                 ERR! |
+-----------------------------------------+----------------------+----------------------+
| Processes:                                                                            |
|    0   N/A  N/A      4242      C   python3                                      40MiB |
+---------------------------------------------------------------------------------------+
"""
LISTED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa)
  MIG 3g.20gb     Device  0: (UUID: MIG-1)
  MIG 1g.5gb      Device  1: (UUID: MIG-2)
"""
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV4\tSYS\tPIX\t0-31\t0
GPU1\tNV4\t X \tSYS\tSYS\t0-31\t0
GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1
NIC0\tPIX\tSYS\tSYS\t X
"""
NVLINK = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa)
\t Link 0: 25 GB/s
\t Link 1: <inactive>
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb)
\t Link 0: 25 GB/s
\t Link 1: 25 GB/s
"""
KERNEL = """\
[    5.100000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module  535.54.03
[  100.000000] NVRM: Xid (PCI:0000:3b:00): 31, pid=5, name=python3, Ch 00000010, MMU Fault
[  101.000000] NVRM: Xid (PCI:0000:3b:00): 79, name=<unknown>, GPU has fallen off the bus.
[  102.000000] NVRM: Xid (PCI:0000:3b:00): 31, pid=6, name=eval, Ch 00000011, MMU Fault
[  103.000000] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up
[  104.000000] eth0: link becomes ready
[  105.000000] INFO: task nvidia-smi:4242 blocked for more than 120 seconds.
"""
DCGM_TABLE = """\
+---------------------------+------------------------------------------------+
| Diagnostic                | Result                                         |
+===========================+================================================+
|-----  Hardware  ----------+------------------------------------------------|
| memory                    | Fail                                           |
|                           | GPU0: Pass                                     |
|                           | GPU3: Fail                                     |
| Warning: GPU3             | Double-bit ECC errors were found; please rese  |
|                           | t the GPU.                                     |
| pcie                      | Pass                                           |
"""
DCGM_JSON = """{"DCGM Diagnostic": {"test_categories": [{"category": "Hardware", "tests": [
 {"name": "memory", "results": [
  {"entity_id": 0, "status": "Pass"},
  {"entity_id": 1, "status": "Fail",
   "warnings": [{"warning": "row remap failed", "error_id": 9}]}]},
 {"name": "pcie", "results": [{"gpu_ids": "0,1", "status": "PASS"}]}]}]}}
"""
ALL = {
    "query": QUERY, "xml": XML, "csv": CSV, "table": TABLE, "listed": LISTED,
    "topology": TOPOLOGY, "nvlink": NVLINK, "kernel": KERNEL, "dcgm_table": DCGM_TABLE,
    "dcgm_json": DCGM_JSON,
}  # fmt: skip
