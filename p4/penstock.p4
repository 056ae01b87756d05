// An aggregator in a switch: P4-16, v1model. docs/design/p4.md draws it and maps it to the rules of docs/design/aggregation.md.
//
// The fixed-size integer mode: every block is BLOCK_BYTES long, its elements are 32-bit integers (added, modulo 2^32) or
// 16-bit exponents (combined by maximum). One packet in, at most one packet out, to one address or the same to all children.
// The reference is `Aggregator` of crates/penstock-aggregation; `p4/twin.py` is this file in Python, table for table and
// register for register; `vectors/` holds what all three must do.

#include <core.p4>
#include <v1model.p4>

// 32-bit words of a block: 16, 64 or 256.
#ifndef BLOCK_WORDS
#define BLOCK_WORDS 64
#endif
#define BLOCK_BYTES (BLOCK_WORDS * 4)
// Slots of all jobs together; a job takes as many as its window.
#define SLOTS 4096
// Places for jobs. Place 0 is nobody's: it counts what belongs to no job.
#define JOBS 64

// EACH_WORD(M) is M(00) M(01) ... in hexadecimal, as many as BLOCK_WORDS. EACH_CHILD(M) is M(0) ... M(f).
#define EACH_CHILD(M) M(0) M(1) M(2) M(3) M(4) M(5) M(6) M(7) M(8) M(9) M(a) M(b) M(c) M(d) M(e) M(f)
#define SIXTEEN(M, h) M(h##0) M(h##1) M(h##2) M(h##3) M(h##4) M(h##5) M(h##6) M(h##7) \
                      M(h##8) M(h##9) M(h##a) M(h##b) M(h##c) M(h##d) M(h##e) M(h##f)
#if BLOCK_WORDS == 16
#define EACH_WORD(M) SIXTEEN(M, 0)
#elif BLOCK_WORDS == 64
#define EACH_WORD(M) SIXTEEN(M, 0) SIXTEEN(M, 1) SIXTEEN(M, 2) SIXTEEN(M, 3)
#elif BLOCK_WORDS == 256
#define EACH_WORD(M) SIXTEEN(M, 0) SIXTEEN(M, 1) SIXTEEN(M, 2) SIXTEEN(M, 3) SIXTEEN(M, 4) SIXTEEN(M, 5) SIXTEEN(M, 6) \
                     SIXTEEN(M, 7) SIXTEEN(M, 8) SIXTEEN(M, 9) SIXTEEN(M, a) SIXTEEN(M, b) SIXTEEN(M, c) SIXTEEN(M, d) \
                     SIXTEEN(M, e) SIXTEEN(M, f)
#else
#error "BLOCK_WORDS must be 16, 64 or 256"
#endif

// R7, numbers are compared on a circle: a is newer than b when 1 <= a - b < 2^31.
#define NEWER(a, b) ((a) - (b) - 32w1 < 32w0x7fffffff)

// ------------------------------------------------------------------------------------------------------------- headers

const bit<16> IPV4 = 0x0800;
const bit<8> UDP = 17;

header ethernet_t {
    bit<48> dst;
    bit<48> src;
    bit<16> ether_type;
}

header ipv4_t {
    bit<4> version;
    bit<4> ihl;
    bit<8> diffserv;
    bit<16> length;
    bit<16> identification;
    bit<3> flags;
    bit<13> fragment;
    bit<8> ttl;
    bit<8> protocol;
    bit<16> checksum;
    bit<32> src;
    bit<32> dst;
}

header udp_t {
    bit<16> src;
    bit<16> dst;
    bit<16> length;
    bit<16> checksum;
}

// docs/reference/packets.md.
header penstock_t {
    bit<16> magic;
    bit<8> version;
    bit<8> kind;
    bit<32> job;
    bit<16> epoch;
    bit<8> format;
    bit<8> flags;
    bit<32> seq;
    bit<32> ack;
    bit<32> credit;
    bit<16> exponent;
    bit<16> length;
    bit<32> digest;
    bit<64> workers;
    bit<64> mac;
}

#define FIELD(i) bit<32> w_##i;
header block_t {
    EACH_WORD(FIELD)
}

struct headers_t {
    ethernet_t ethernet;
    ipv4_t ipv4;
    udp_t udp;
    penstock_t penstock;
    block_t block;
}

const bit<8> PUSH = 1;
const bit<8> RESULT = 2;
const bit<8> HEARTBEAT_UP = 3;
const bit<8> HEARTBEAT_DOWN = 4;
const bit<8> REQUEST = 5;
const bit<8> MISSING = 6;
const bit<8> ACCEPTED = 7;
const bit<8> PULL = 8;
const bit<8> PULLED = 9;

const bit<8> NONE = 0;
const bit<8> I32 = 1;
const bit<8> I16 = 2;
const bit<8> EXPONENTS = 3;
const bit<8> F32 = 4;
const bit<8> BF16 = 6;
const bit<8> TEXT = 7;

const bit<8> LOST = 1;
const bit<8> FULL = 2;
const bit<8> LAST = 4;

const bit<16> HEADER_BYTES = 48;
const bit<16> MAX_PAYLOAD_BYTES = 8896;

// What is counted for each job: refusals by their number in rules.rs, then what JobCounters has.
const bit<32> MALFORMED = 0;
const bit<32> JOB = 1;
const bit<32> EPOCH = 2;
const bit<32> KEY = 3;
const bit<32> SENDER = 4;
const bit<32> FORMAT = 5;
const bit<32> LENGTH = 6;
const bit<32> STALE = 7;
const bit<32> DUPLICATE = 8;
const bit<32> KIND = 11;
const bit<32> ADDED = 16;
const bit<32> COMPLETED = 17;
const bit<32> REPEATED = 18;
const bit<32> RELAYED = 19;
const bit<32> ABANDONED = 20;
const bit<32> NAMED = 21;

// What the controls of a packet hand each other.
// More than 16 fields: v1model passes one struct through all of them, and table entries and registers are read into it.
struct metadata_t {
    // `here`: the address that children and parent know.
    bit<48> own_mac;
    bit<32> own_ip;
    bit<16> own_udp;
    // `jobs`: what the control plane said when it opened the job.
    bit<32> job;
    bit<64> lease;
    bit<16> epoch;
    bit<32> base;
    bit<32> mask;
    bit<16> children;
    bit<64> workers;
    bit<48> parent_mac;
    bit<32> parent_ip;
    bit<16> parent_udp;
    bit<16> parent_shards;
    bit<9> parent_port;
    bit<16> group;
    // `senders`: the child's bit; children are numbered from 0 without gaps.
    bit<16> child;
    // The heart table: the minima over all children before and after this packet.
    bit<16> heard_before;
    bit<16> heard;
    bit<32> ack_before;
    bit<32> credit_before;
    bit<32> ack;
    bit<32> credit;
    // The slot.
    bit<32> slot;
}

// -------------------------------------------------------------------------------------------------------------- parser

parser Read(packet_in packet, out headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    state start {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            IPV4: read_ipv4;
            default: accept;
        }
    }
    state read_ipv4 {
        packet.extract(hdr.ipv4);
        // No options, no fragments: what else comes is forwarded, or dropped, but never added.
        transition select(hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.flags & 1, hdr.ipv4.fragment, hdr.ipv4.protocol) {
            (4, 5, 0, 0, UDP): read_udp;
            default: accept;
        }
    }
    state read_udp {
        packet.extract(hdr.udp);
        transition select(hdr.udp.length) {
            0..55: accept; // too short for our header
            default: read_penstock;
        }
    }
    state read_penstock {
        packet.extract(hdr.penstock);
        // Other lengths, and results, stay behind the headers as they are.
        transition select(hdr.penstock.kind, hdr.penstock.length, hdr.udp.length) {
            (PUSH, BLOCK_BYTES, BLOCK_BYTES + 56): read_block;
            default: accept;
        }
    }
    state read_block {
        packet.extract(hdr.block);
        transition accept;
    }
}

// UDP's sum covers a pseudo-header, the header and all that follows, which lies in hdr.block or behind the headers.
#define PSEUDO_AND_UDP hdr.ipv4.src, hdr.ipv4.dst, 8w0, hdr.ipv4.protocol, hdr.udp.length, hdr.udp.src, hdr.udp.dst, hdr.udp.length
#define PENSTOCK hdr.penstock.magic, hdr.penstock.version, hdr.penstock.kind, hdr.penstock.job, hdr.penstock.epoch, \
    hdr.penstock.format, hdr.penstock.flags, hdr.penstock.seq, hdr.penstock.ack, hdr.penstock.credit, \
    hdr.penstock.exponent, hdr.penstock.length, hdr.penstock.digest, hdr.penstock.workers, hdr.penstock.mac
#define WORD(i) , hdr.block.w_##i
#define IPV4_FIELDS hdr.ipv4.version, hdr.ipv4.ihl, hdr.ipv4.diffserv, hdr.ipv4.length, hdr.ipv4.identification, \
    hdr.ipv4.flags, hdr.ipv4.fragment, hdr.ipv4.ttl, hdr.ipv4.protocol, hdr.ipv4.src, hdr.ipv4.dst

control Verify(inout headers_t hdr, inout metadata_t meta) {
    apply {
        verify_checksum(hdr.udp.isValid(), { IPV4_FIELDS }, hdr.ipv4.checksum, HashAlgorithm.csum16);
        verify_checksum(hdr.block.isValid() && hdr.udp.checksum != 0, { PSEUDO_AND_UDP, PENSTOCK EACH_WORD(WORD) },
                        hdr.udp.checksum, HashAlgorithm.csum16);
        verify_checksum_with_payload(hdr.penstock.isValid() && !hdr.block.isValid() && hdr.udp.checksum != 0,
                                     { PSEUDO_AND_UDP, PENSTOCK }, hdr.udp.checksum, HashAlgorithm.csum16);
    }
}

// ------------------------------------------------------------------------------------------------------------- ingress

control Aggregator(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    counter(JOBS * 32, CounterType.packets) events;

    // The slot table. A slot whose lease is not its job's is empty: registers need no clearing when a job is opened.
    register<bit<64>>(SLOTS) slot_lease;
    register<bit<32>>(SLOTS) slot_tag;
    register<bit<32>>(SLOTS) slot_have_high; // the workers that are in: 63 to 32, and 31 to 0
    register<bit<32>>(SLOTS) slot_have_low;
    register<bit<32>>(SLOTS) slot_shape; // LAST, format and exponent
#define SUM(i) register<bit<32>>(SLOTS) sum_##i;
    EACH_WORD(SUM)

    // The heart table: who was heard since the job was opened, and each child's newest Ack and Credit.
    register<bit<64>>(JOBS) heart_lease;
    register<bit<16>>(JOBS) heart_heard;
#define HEART(i) register<bit<32>>(JOBS) ack_##i; register<bit<32>>(JOBS) credit_##i;
    EACH_CHILD(HEART)

    action mine(bit<48> mac) {
        meta.own_mac = mac;
        meta.own_ip = hdr.ipv4.dst;
        meta.own_udp = hdr.udp.dst;
    }
    table here {
        key = { hdr.ipv4.dst: exact; hdr.udp.dst: exact; }
        actions = { mine; NoAction; }
        default_action = NoAction();
        size = 16;
    }

    action job(bit<32> place, bit<64> lease, bit<16> epoch, bit<32> base, bit<32> mask, bit<16> children, bit<64> workers,
               bit<48> mac, bit<32> ip, bit<16> udp, bit<16> shards, bit<9> port, bit<16> group) {
        meta.job = place;
        meta.lease = lease;
        meta.epoch = epoch;
        meta.base = base;
        meta.mask = mask;
        meta.children = children;
        meta.workers = workers;
        meta.parent_mac = mac;
        meta.parent_ip = ip;
        meta.parent_udp = udp;
        meta.parent_shards = shards;
        meta.parent_port = port;
        meta.group = group;
    }
    table jobs {
        key = { hdr.penstock.job: exact; }
        actions = { job; NoAction; }
        default_action = NoAction();
        size = JOBS;
    }

    // Also by the port that a packet came in by: an address can be forged, a port cannot.
    action sender(bit<16> child) {
        meta.child = child;
    }
    table senders {
        key = {
            meta.job: exact;
            standard.ingress_port: exact;
            hdr.ipv4.src: exact;
            hdr.udp.src: exact;
            hdr.penstock.workers: exact;
        }
        actions = { sender; NoAction; }
        default_action = NoAction();
        size = 4096;
    }

    action to_port(bit<9> port) {
        standard.egress_spec = port;
    }
    action flood(bit<16> group) {
        standard.mcast_grp = group;
    }
    action drop() {
        mark_to_drop(standard);
    }
    table forward {
        key = { hdr.ethernet.dst: exact; }
        actions = { to_port; flood; drop; }
        default_action = drop();
        size = 1024;
    }

    action count(bit<32> event) {
        events.count((meta.job << 5) + event);
    }

    // From this node to its parent, on behalf of all children. The length of the packet is as it came.
    action send_up(bit<8> kind, bit<32> seq, bit<8> flags, bit<8> format, bit<16> exponent) {
        hdr.ethernet.src = meta.own_mac;
        hdr.ethernet.dst = meta.parent_mac;
        hdr.ipv4.src = meta.own_ip;
        hdr.ipv4.dst = meta.parent_ip;
        hdr.ipv4.ttl = 64;
        hdr.udp.src = meta.own_udp;
        hdr.udp.dst = meta.parent_udp + (seq[15:0] & meta.parent_shards);
        hdr.penstock.kind = kind;
        hdr.penstock.format = format;
        hdr.penstock.flags = flags;
        hdr.penstock.seq = seq;
        hdr.penstock.ack = meta.ack;
        hdr.penstock.credit = meta.credit;
        hdr.penstock.exponent = exponent;
        hdr.penstock.workers = meta.workers;
        standard.egress_spec = meta.parent_port;
    }

    // The sum of a slot, one register a word. Each leaves the slot's sum in the packet.
    action overwrite() {
#define OVERWRITE(i) sum_##i.write(meta.slot, hdr.block.w_##i);
        EACH_WORD(OVERWRITE)
    }
    action add_integers() {
        bit<32> before;
#define ADD(i) sum_##i.read(before, meta.slot); \
        hdr.block.w_##i = hdr.block.w_##i + before; \
        sum_##i.write(meta.slot, hdr.block.w_##i);
        EACH_WORD(ADD)
    }
    // With the sign bits flipped, numbers with a sign are in the order of numbers without.
    action take_maxima() {
        bit<32> before;
        bit<16> high;
        bit<16> low;
#define MAXIMUM(i) sum_##i.read(before, meta.slot); \
        high = (before[31:16] ^ 0x8000) > (hdr.block.w_##i[31:16] ^ 0x8000) ? before[31:16] : hdr.block.w_##i[31:16]; \
        low = (before[15:0] ^ 0x8000) > (hdr.block.w_##i[15:0] ^ 0x8000) ? before[15:0] : hdr.block.w_##i[15:0]; \
        hdr.block.w_##i = high ++ low; \
        sum_##i.write(meta.slot, hdr.block.w_##i);
        EACH_WORD(MAXIMUM)
    }
    action load() {
#define LOAD(i) sum_##i.read(hdr.block.w_##i, meta.slot);
        EACH_WORD(LOAD)
    }

    apply {
        bool malformed = false;
        bool is_for_tables = false;

        if (!hdr.udp.isValid() || !here.apply().hit) {
            // Not for this node: a switch is still a switch.
            if (standard.parser_error != error.NoError) {
                drop();
            } else {
                forward.apply();
            }
        } else {
            // Nothing leaves but what send_up or a multicast group sends.
            drop();

            // What `decode` of packet.rs refuses, where all reasons count as one.
            if (standard.parser_error != error.NoError || standard.checksum_error == 1 || !hdr.penstock.isValid()) {
                malformed = true;
            } else if (hdr.penstock.magic != 0x5041 || hdr.penstock.version != 4) {
                malformed = true;
            } else if (hdr.penstock.kind < PUSH || hdr.penstock.kind > PULLED || hdr.penstock.format > TEXT) {
                malformed = true;
            } else if (hdr.udp.length != hdr.penstock.length + 16w56 || hdr.ipv4.length != hdr.udp.length + 16w20
                       || hdr.penstock.length > MAX_PAYLOAD_BYTES) {
                malformed = true;
            } else if (hdr.penstock.format == TEXT && hdr.penstock.kind != PULLED) {
                malformed = true;
            } else if (hdr.penstock.kind == PUSH || hdr.penstock.kind == RESULT || hdr.penstock.kind == PULLED) {
                if (hdr.penstock.format == NONE || hdr.penstock.length == 0) {
                    malformed = true;
                } else if (hdr.penstock.format != TEXT && (hdr.penstock.length & 1) != 0) {
                    malformed = true;
                } else if ((hdr.penstock.format == I32 || hdr.penstock.format == F32) && (hdr.penstock.length & 3) != 0) {
                    malformed = true;
                } else if (hdr.penstock.kind == PUSH && (hdr.penstock.flags > (LOST | FULL | LAST) || hdr.penstock.workers == 0)) {
                    malformed = true;
                } else if (hdr.penstock.kind != PUSH && (hdr.penstock.flags & (FULL ^ 0xff)) != 0) {
                    malformed = true;
                }
            } else {
                if (hdr.penstock.format != NONE || hdr.penstock.length != 0) {
                    malformed = true;
                } else if (hdr.penstock.kind != HEARTBEAT_DOWN && hdr.penstock.kind != MISSING && hdr.penstock.kind != ACCEPTED
                           && hdr.penstock.workers == 0) {
                    malformed = true;
                } else if (hdr.penstock.kind == HEARTBEAT_DOWN || hdr.penstock.kind == MISSING || hdr.penstock.kind == ACCEPTED) {
                    malformed = hdr.penstock.flags != 0;
                } else {
                    malformed = hdr.penstock.flags > LOST;
                }
            }

            if (malformed) {
                count(MALFORMED);
            } else if (!jobs.apply().hit) {
                count(JOB);
            } else if (hdr.penstock.mac != 0 || hdr.penstock.digest != 0) {
                count(KEY); // no job here has a key
            } else if (hdr.penstock.epoch != meta.epoch) {
                count(EPOCH); // R6
            } else if (hdr.penstock.kind == RESULT || hdr.penstock.kind == PULLED || hdr.penstock.kind == ACCEPTED
                       || hdr.penstock.kind == HEARTBEAT_DOWN || hdr.penstock.kind == MISSING) {
                if (hdr.ipv4.src != meta.parent_ip || standard.ingress_port != meta.parent_port
                    || hdr.udp.src - meta.parent_udp > meta.parent_shards) {
                    count(SENDER);
                } else if (hdr.penstock.kind == MISSING) {
                    is_for_tables = true; // meta.child is 0: nobody is heard
                } else {
                    count(RELAYED);
                    standard.mcast_grp = meta.group;
                }
            } else if (hdr.penstock.kind == REQUEST || hdr.penstock.kind == PULL) {
                count(KIND);
            } else if (senders.apply().hit) {
                is_for_tables = true;
            } else {
                count(SENDER);
            }

            if (is_for_tables) {
                // R5: the newest of each child, and the minimum over all of them, before and after.
                @atomic {
                    bit<64> holder;
                    bit<32> ack;
                    bit<32> credit;
                    heart_lease.read(holder, meta.job);
                    heart_heard.read(meta.heard_before, meta.job);
                    if (holder != meta.lease) {
                        meta.heard_before = 0;
                        heart_lease.write(meta.job, meta.lease);
                    }
                    meta.heard = meta.heard_before | meta.child;
                    heart_heard.write(meta.job, meta.heard);
// The first child's number starts the minimum.
#define IS_LEAST(i, value, least) 0x##i == 0 || ((meta.children & (16w1 << 0x##i)) != 0 && !NEWER(value, least))
#define HEAR(i) \
                    ack_##i.read(ack, meta.job); \
                    credit_##i.read(credit, meta.job); \
                    if (IS_LEAST(i, ack, meta.ack_before)) { meta.ack_before = ack; } \
                    if (IS_LEAST(i, credit, meta.credit_before)) { meta.credit_before = credit; } \
                    if (meta.child == (16w1 << 0x##i)) { \
                        if ((meta.heard_before & meta.child) == 0 || NEWER(hdr.penstock.ack, ack)) { \
                            ack = hdr.penstock.ack; \
                            ack_##i.write(meta.job, ack); \
                        } \
                        if ((meta.heard_before & meta.child) == 0 || NEWER(hdr.penstock.credit, credit)) { \
                            credit = hdr.penstock.credit; \
                            credit_##i.write(meta.job, credit); \
                        } \
                    } \
                    if (IS_LEAST(i, ack, meta.ack)) { meta.ack = ack; } \
                    if (IS_LEAST(i, credit, meta.credit)) { meta.credit = credit; }
                    EACH_CHILD(HEAR)
                }

                if (hdr.penstock.kind == HEARTBEAT_UP) {
                    // What is new goes up at once. The first child's goes up always: it makes up for a loss.
                    if (meta.heard == meta.children
                        && (meta.child == 1 || meta.heard_before != meta.children
                            || meta.ack != meta.ack_before || meta.credit != meta.credit_before)) {
                        send_up(HEARTBEAT_UP, 0, 0, NONE, 0);
                    }
                } else if (hdr.penstock.kind == PUSH
                           && ((hdr.penstock.flags & FULL) != 0
                               || (hdr.penstock.format != I32 && hdr.penstock.format != EXPONENTS))) {
                    count(FORMAT);
                } else if (hdr.penstock.kind == PUSH && !hdr.block.isValid()) {
                    count(LENGTH);
                } else {
                    @atomic {
                        bit<64> holder;
                        bit<32> seq;
                        bit<32> high;
                        bit<32> low;
                        bit<64> bitmap;
                        bit<32> alike;
                        bit<32> shape = (hdr.penstock.flags & LAST) ++ hdr.penstock.format ++ hdr.penstock.exponent;
                        bool empty;
                        bool is_newer;
                        bool is_added = false;
                        meta.slot = meta.base + (hdr.penstock.seq & meta.mask);
                        slot_lease.read(holder, meta.slot);
                        slot_tag.read(seq, meta.slot);
                        slot_have_high.read(high, meta.slot);
                        slot_have_low.read(low, meta.slot);
                        bitmap = high ++ low;
                        slot_shape.read(alike, meta.slot);
                        empty = holder != meta.lease;
                        is_newer = empty || NEWER(hdr.penstock.seq, seq);
                        if (!is_newer && hdr.penstock.seq != seq) {
                            count(STALE); // R2
                        } else if (hdr.penstock.kind == MISSING) {
                            if (is_newer) {
                                bitmap = 0;
                            }
                            hdr.penstock.workers = hdr.penstock.workers & meta.workers;
                            if (hdr.penstock.workers != 0 && bitmap == meta.workers) {
                                // The sum was lost above: the packet that asks becomes the kept sum.
                                hdr.block.setValid();
                                hdr.penstock.length = BLOCK_BYTES;
                                hdr.udp.length = BLOCK_BYTES + 56;
                                hdr.ipv4.length = BLOCK_BYTES + 76;
                                load();
                                count(REPEATED);
                                send_up(PUSH, hdr.penstock.seq, alike[31:24], alike[23:16], alike[15:0]);
                            } else if ((hdr.penstock.workers & ~bitmap) != 0) {
                                hdr.penstock.workers = hdr.penstock.workers & ~bitmap;
                                count(NAMED);
                                standard.mcast_grp = meta.group;
                            }
                        } else if (is_newer) {
                            // R1: the slot is this block's; overwriting clears what an earlier one left.
                            if (!empty && bitmap != meta.workers) {
                                count(ABANDONED);
                            }
                            slot_lease.write(meta.slot, meta.lease);
                            slot_tag.write(meta.slot, hdr.penstock.seq);
                            bitmap = 0;
                            slot_shape.write(meta.slot, shape);
                            overwrite();
                            is_added = true;
                        } else if (alike != shape) {
                            count(FORMAT);
                        } else if ((bitmap & hdr.penstock.workers) != 0) {
                            count(DUPLICATE); // R3
                            if (bitmap == meta.workers) {
                                // R4: the kept sum, as it went up before.
                                load();
                                count(REPEATED);
                                send_up(PUSH, hdr.penstock.seq, alike[31:24], alike[23:16], alike[15:0]);
                            }
                        } else {
                            if (hdr.penstock.format == I32) {
                                add_integers();
                            } else {
                                take_maxima();
                            }
                            is_added = true;
                        }
                        if (is_added) {
                            count(ADDED);
                            bitmap = bitmap | hdr.penstock.workers;
                            slot_have_high.write(meta.slot, bitmap[63:32]);
                            slot_have_low.write(meta.slot, bitmap[31:0]);
                            if (bitmap == meta.workers) {
                                count(COMPLETED);
                                send_up(PUSH, hdr.penstock.seq, shape[31:24], hdr.penstock.format, hdr.penstock.exponent);
                            }
                        }
                    }
                }
            }
        }
    }
}

// -------------------------------------------------------------------------------------------------------------- egress

control Copies(inout headers_t hdr, inout metadata_t meta, inout standard_metadata_t standard) {
    action to_child(bit<48> mac, bit<32> ip, bit<16> udp, bit<16> shards) {
        hdr.ethernet.src = meta.own_mac;
        hdr.ethernet.dst = mac;
        hdr.ipv4.src = meta.own_ip;
        hdr.ipv4.dst = ip;
        hdr.ipv4.ttl = 64;
        hdr.udp.src = meta.own_udp;
        hdr.udp.dst = udp + (hdr.penstock.seq[15:0] & shards);
    }
    action drop() {
        mark_to_drop(standard);
    }
    // A copy's number in the multicast group is its child's, counted from 1.
    table children {
        key = { meta.job: exact; standard.egress_rid: exact; }
        actions = { to_child; drop; }
        default_action = drop();
        size = 1024;
    }

    apply {
        if (meta.job != 0 && standard.egress_rid != 0) {
            children.apply();
        }
    }
}

control Update(inout headers_t hdr, inout metadata_t meta) {
    apply {
        update_checksum(meta.job != 0, { IPV4_FIELDS }, hdr.ipv4.checksum, HashAlgorithm.csum16);
        update_checksum(meta.job != 0 && hdr.block.isValid(), { PSEUDO_AND_UDP, PENSTOCK EACH_WORD(WORD) }, hdr.udp.checksum,
                        HashAlgorithm.csum16);
        update_checksum_with_payload(meta.job != 0 && !hdr.block.isValid(), { PSEUDO_AND_UDP, PENSTOCK }, hdr.udp.checksum,
                                     HashAlgorithm.csum16);
    }
}

control Write(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr);
    }
}

V1Switch(Read(), Verify(), Aggregator(), Copies(), Update(), Write()) main;
