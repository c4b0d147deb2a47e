//! Operators of emberd's own for ONNX Runtime, in the domain [`DOMAIN`]: the matrix products of a decoder and what lies between them, each in one node.
//!
//! | operator | takes the place of |
//! |---|---|
//! | [`Attention`](ops::Attention) | Reshape, GroupQueryAttention, Reshape, and the block sums after them |
//! | [`AddNorm`](ops::AddNorm) | SkipSimplifiedLayerNormalization or SimplifiedLayerNormalization, and the block sums |
//! | [`Gated`](ops::Gated) | Split, QuickGelu, Mul, and the block sums |
//! | [`Product`](ops::Product) | MatMulNBits |
//!
//! Two things are gained. A pass has half as many nodes; and what a row gets does not depend on what is computed beside it: neither on the other rows
//! of a batch nor on how many tokens of a text are read at once, to the bit. The runtime's attention sums in another order for one token than for several.
//!
//! A product multiplies whole numbers (`digits`, `weights`, `product`): as exact as one of floats, and as fast as one of bytes.
//!
//! `abi` is the C interface and the only place that knows it; `lanes` is arithmetic on sixteen numbers; `attention`, `norm` and `gated` compute on slices; `ops` ties both together.
//! Which graph gets these operators is decided elsewhere; nothing here knows models or files.

#![allow(unsafe_code)] // The runtime's interface is C, and units of one pass write to disjoint parts of one tensor.

mod abi;
mod attention;
mod digits;
mod gated;
mod lanes;
mod norm;
pub mod ops;
mod pages;
mod product;
mod weights;

pub use abi::{OrtApiBase, OrtSessionOptions, OrtStatusPtr};

/// The domain of the operators, as a graph names it.
pub const DOMAIN: &str = "emberd";

/// Adds the operators to a session's options: what ONNX Runtime calls in a library of operators. Returns null, or why it could not; null as well where the runtime
/// is too old for these operators, of which its session then says that it does not know them.
///
/// # Safety
/// Both pointers must be those that ONNX Runtime hands to `RegisterCustomOps`.
pub unsafe fn register(options: *mut OrtSessionOptions, base: *const OrtApiBase) -> OrtStatusPtr {
    // SAFETY: as promised by the caller.
    unsafe { abi::register(options, base, &ops::ALL) }
}
