//! What every call gives, computed from its definition.

use super::program::{Program, ProgramCall, What, unequal};
use fastrand::Rng;
use penstock_types::{DType, ReduceOp};

/// What a rank of the group brings to a call: its first `bytes`, which all ranks know.
pub(super) fn contribution(program: &Program, call: usize, place: usize, bytes: usize) -> Vec<u8> {
    let ProgramCall { what, dtype, op, .. } = program.calls[call];
    let mut rng = Rng::with_seed(program.seed ^ (call as u64) << 40 ^ (place as u64) << 32 ^ 0xda7a);
    let period = bytes.min(PERIOD * dtype.size());
    let mut out = Vec::with_capacity(period);
    if !matches!(what, What::AllReduce | What::ReduceScatter | What::Reduce { .. }) {
        out.resize(period, 0);
        rng.fill(&mut out);
        return repeat(&out, bytes);
    }
    while out.len() < period {
        let small = rng.i64(-2..=2);
        let value = match (dtype, op) {
            (DType::Bool, _) => small & 1,
            (_, ReduceOp::Product) if dtype.is_float() => [1, 2, -1][rng.usize(..3)],
            (DType::U8, ReduceOp::Avg) => small.abs(),
            (_, ReduceOp::Avg) => small,
            _ if dtype.is_float() => small,
            _ => rng.i64(..),
        };
        Number::of(dtype, value).encode(dtype, &mut out);
    }
    repeat(&out, bytes)
}

/// Whatever is repeated with this period, a prime number of elements, differs wherever a frame or a segment may begin.
fn repeat(period: &[u8], bytes: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes);
    while out.len() < bytes {
        out.extend_from_slice(&period[..period.len().min(bytes - out.len())]);
    }
    out
}

/// What a rank's output is when the call has succeeded, and where in it a rank finds what it had before.
pub(super) fn result(program: &Program, call: usize, place: usize) -> Option<Vec<u8>> {
    let ProgramCall { group, what, dtype, op, elements, .. } = program.calls[call];
    let world = program.groups[group].members.len();
    let one = elements as usize * dtype.size();
    let whole = |rank: usize, bytes: usize| contribution(program, call, rank, bytes);
    let part = |rank: usize, part: usize| whole(rank, one * world)[part * one..][..one].to_vec();
    let reduced = |bytes: usize| {
        let parts: Vec<Vec<u8>> = (0..world).map(|rank| whole(rank, bytes)).collect();
        reduce(&parts, dtype, op)
    };
    let joined = |of: &dyn Fn(usize) -> Vec<u8>| (0..world).map(of).collect::<Vec<_>>().concat();
    Some(match what {
        What::AllReduce => reduced(one),
        What::ReduceScatter => reduced(one * world)[place * one..][..one].to_vec(),
        What::AllGather => joined(&|rank| whole(rank, one)),
        What::Broadcast { root } => whole(root, one),
        What::Reduce { root } if root == place => reduced(one),
        What::Reduce { .. } => whole(place, one),
        What::Gather { root } if root == place => joined(&|rank| whole(rank, one)),
        What::Scatter { root } => part(root, place),
        What::AllToAll { has_splits: false } => joined(&|rank| part(rank, place)),
        What::AllToAll { has_splits: true } => {
            let size = |from, to| unequal(call, from, to, elements) as usize * dtype.size();
            let from = |rank: usize| {
                let before: usize = (0..place).map(|to| size(rank, to)).sum();
                whole(rank, before + size(rank, place))[before..].to_vec()
            };
            joined(&from)
        }
        What::Message { from, to, .. } if to == place => whole(from, one),
        What::Message { .. } | What::Barrier | What::Open | What::Gather { .. } => return None,
    })
}

fn reduce(parts: &[Vec<u8>], dtype: DType, op: ReduceOp) -> Vec<u8> {
    let period = parts[0].len().min(PERIOD * dtype.size());
    let mut out = Vec::with_capacity(period);
    for at in (0..period).step_by(dtype.size()) {
        let numbers = parts.iter().map(|part| Number::decode(dtype, &part[at..at + dtype.size()]));
        let result = match op {
            ReduceOp::PremulSum(factor) => {
                numbers.map(|number| number.times(factor)).reduce(|a, b| a.with(b, ReduceOp::Sum, dtype))
            }
            ReduceOp::Avg => numbers.reduce(|a, b| a.with(b, ReduceOp::Sum, dtype)).map(|sum| sum.over(parts.len())),
            op => numbers.reduce(|a, b| a.with(b, op, dtype)),
        };
        result.expect("a group has ranks").encode(dtype, &mut out);
    }
    repeat(&out, parts[0].len())
}

#[derive(Clone, Copy)]
enum Number {
    Integer(i64),
    Float(f64),
}

impl Number {
    fn of(dtype: DType, value: i64) -> Number {
        if dtype.is_float() { Number::Float(value as f64) } else { Number::Integer(value) }
    }

    fn with(self, other: Number, op: ReduceOp, dtype: DType) -> Number {
        match (self, other) {
            (Number::Float(a), Number::Float(b)) => Number::Float(match op {
                ReduceOp::Sum => a + b,
                ReduceOp::Product => a * b,
                ReduceOp::Min => a.min(b),
                ReduceOp::Max => a.max(b),
                _ => unreachable!("integers only"),
            }),
            (Number::Integer(a), Number::Integer(b)) if dtype == DType::Bool => Number::Integer(match op {
                ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr => a | b,
                ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => a & b,
                _ => a ^ b,
            }),
            (Number::Integer(a), Number::Integer(b)) => Number::Integer(match op {
                ReduceOp::Sum => a.wrapping_add(b),
                ReduceOp::Product => a.wrapping_mul(b),
                ReduceOp::Min => a.min(b),
                ReduceOp::Max => a.max(b),
                ReduceOp::BitAnd => a & b,
                ReduceOp::BitOr => a | b,
                _ => a ^ b,
            }),
            _ => unreachable!("of one dtype"),
        }
    }

    fn times(self, factor: f64) -> Number {
        match self {
            Number::Float(value) => Number::Float(value * factor),
            Number::Integer(_) => unreachable!("floats only"),
        }
    }

    fn over(self, ranks: usize) -> Number {
        match self {
            Number::Float(value) => Number::Float(value / ranks as f64),
            Number::Integer(value) => Number::Integer(value / ranks as i64),
        }
    }

    fn encode(self, dtype: DType, out: &mut Vec<u8>) {
        match (self, dtype) {
            (Number::Integer(value), _) => out.extend_from_slice(&value.to_le_bytes()[..dtype.size()]),
            (Number::Float(value), DType::F64) => out.extend_from_slice(&value.to_le_bytes()),
            (Number::Float(value), DType::F32) => out.extend_from_slice(&(value as f32).to_le_bytes()),
            (Number::Float(value), DType::BF16) => out.extend_from_slice(&(value as f32).to_le_bytes()[2..]),
            (Number::Float(value), _) => out.extend_from_slice(&half(value).to_le_bytes()),
        }
    }

    fn decode(dtype: DType, bytes: &[u8]) -> Number {
        let mut wide = [0; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(wide);
        match dtype {
            DType::F64 => Number::Float(f64::from_bits(bits)),
            DType::F32 => Number::Float(f64::from(f32::from_bits(bits as u32))),
            DType::BF16 => Number::Float(f64::from(f32::from_bits((bits as u32) << 16))),
            DType::F16 => Number::Float(float(bits as u16)),
            DType::I8 => Number::Integer(i64::from(bits as i8)),
            DType::I16 => Number::Integer(i64::from(bits as i16)),
            DType::I32 => Number::Integer(i64::from(bits as i32)),
            _ => Number::Integer(bits as i64),
        }
    }
}

/// A small number with few digits as a binary16: it is exact.
fn half(value: f64) -> u16 {
    let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
    if value == 0.0 {
        return sign;
    }
    let bits = value.to_bits();
    let exponent = ((bits >> 52) & 0x7ff) as i64 - 1023 + 15;
    sign | (exponent as u16) << 10 | (bits >> 42) as u16 & 0x3ff
}

fn float(half: u16) -> f64 {
    let sign = if half & 0x8000 != 0 { -1.0 } else { 1.0 };
    if half & 0x7fff == 0 {
        return 0.0 * sign;
    }
    let exponent = i32::from(half >> 10 & 0x1f) - 15;
    sign * (1.0 + f64::from(half & 0x3ff) / 1024.0) * 2f64.powi(exponent)
}

const PERIOD: usize = 1021;
