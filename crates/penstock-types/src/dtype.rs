//! Element types and reductions.

use std::fmt;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $size:literal, $text:literal;)*) => {
        /// The element type of a tensor. Reductions take the first block; moving data takes all.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum DType { $($(#[$doc])* $name = $code,)* }

        impl DType {
            /// Every dtype, in the order of their codes.
            pub const ALL: &'static [DType] = &[$(DType::$name,)*];

            /// Bytes an element.
            #[must_use]
            pub fn size(self) -> usize {
                match self { $(DType::$name => $size,)* }
            }

            /// The name that torch gives it, without the `torch.`.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(DType::$name => $text,)* }
            }
        }
    };
}

dtypes! {
    /// IEEE 754 binary32.
    F32 = 0, 4, "float32";
    /// IEEE 754 binary64.
    F64 = 1, 8, "float64";
    /// IEEE 754 binary16.
    F16 = 2, 2, "float16";
    /// The upper half of a binary32.
    BF16 = 3, 2, "bfloat16";
    /// Signed 8-bit integer.
    I8 = 4, 1, "int8";
    /// Signed 16-bit integer.
    I16 = 5, 2, "int16";
    /// Signed 32-bit integer.
    I32 = 6, 4, "int32";
    /// Signed 64-bit integer.
    I64 = 7, 8, "int64";
    /// Unsigned 8-bit integer.
    U8 = 8, 1, "uint8";
    /// One byte, 0 or 1.
    Bool = 9, 1, "bool";
    /// Moved only: unsigned 16-bit integer.
    U16 = 16, 2, "uint16";
    /// Moved only: unsigned 32-bit integer.
    U32 = 17, 4, "uint32";
    /// Moved only: unsigned 64-bit integer.
    U64 = 18, 8, "uint64";
    /// Moved only: two binary16.
    C32 = 19, 4, "complex32";
    /// Moved only: two binary32.
    C64 = 20, 8, "complex64";
    /// Moved only: two binary64.
    C128 = 21, 16, "complex128";
    /// Moved only: any other type of one byte an element (the float8 family, packed and quantised types).
    Byte = 22, 1, "byte";
}

impl DType {
    /// The dtype that torch calls `name` (`"float32"`, ...).
    #[must_use]
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }

    /// Whether the kernels can reduce it.
    #[must_use]
    pub fn is_reducible(self) -> bool {
        (self as u8) < DType::U16 as u8
    }

    /// One of the four floating-point types that the kernels reduce.
    #[must_use]
    pub fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A reduction: how elements of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ReduceOp {
    /// Addition; integers wrap; bool is logical or.
    Sum,
    /// Addition, then division by the number of ranks (integers truncate towards zero).
    Avg,
    /// Every rank's input times this factor, then addition. Floating-point types only.
    PremulSum(f64),
    /// Product; integers wrap; bool is logical and.
    Product,
    /// Minimum; NaN wins over numbers, -0 is below +0.
    Min,
    /// Maximum; NaN wins over numbers, +0 is above -0.
    Max,
    /// Bitwise and; integers and bool only.
    BitAnd,
    /// Bitwise or; integers and bool only.
    BitOr,
    /// Bitwise exclusive or; integers and bool only.
    BitXor,
}

impl ReduceOp {
    /// The name that logs and errors use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::PremulSum(_) => "premul_sum",
            ReduceOp::Product => "product",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::BitAnd => "band",
            ReduceOp::BitOr => "bor",
            ReduceOp::BitXor => "bxor",
        }
    }

    /// Whether this reduction is defined on `dtype`.
    #[must_use]
    pub fn takes(self, dtype: DType) -> bool {
        match self {
            ReduceOp::Sum | ReduceOp::Product | ReduceOp::Min | ReduceOp::Max => dtype.is_reducible(),
            ReduceOp::Avg => dtype.is_reducible() && dtype != DType::Bool,
            ReduceOp::PremulSum(_) => dtype.is_float(),
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => dtype.is_reducible() && !dtype.is_float(),
        }
    }
}
