//! The C interface for operators: a table of functions for each operator, and safe views of what a pass hands to one.

mod tensor;

use std::ffi::{CStr, CString, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use ort_sys::{
    ONNXTensorElementDataType, OrtApi, OrtCustomOp, OrtCustomOpInputOutputCharacteristic, OrtErrorCode, OrtKernelContext, OrtKernelInfo,
    OrtMemType,
};
pub use ort_sys::{OrtApiBase, OrtSessionOptions, OrtStatusPtr};
pub(crate) use tensor::{Shared, Tensor};
use tensor::{data, dims, tensor};

/// The version of the interface that is spoken: every later library knows it.
const VERSION: u32 = 17;

/// An input or output of an operator.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    pub(crate) element: ONNXTensorElementDataType,
    pub(crate) optional: bool,
}

/// 32-bit floats.
pub(crate) const FLOATS: Slot = Slot { element: ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, optional: false };
/// 32-bit floats that may be left out.
pub(crate) const MAYBE_FLOATS: Slot = Slot { optional: true, ..FLOATS };
/// Bytes.
pub(crate) const BYTES: Slot = Slot { element: ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, optional: false };
/// Bytes that may be left out.
pub(crate) const MAYBE_BYTES: Slot = Slot { optional: true, ..BYTES };
/// 32-bit integers.
pub(crate) const INTEGERS: Slot = Slot { element: ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, optional: false };

/// An operator: its name and form, what it keeps of a node, and what it does.
pub(crate) trait Operator: Sized + Sync + Send + 'static {
    const NAME: &'static CStr;
    const INPUTS: &'static [Slot];
    const OUTPUTS: &'static [Slot];

    /// Reads a node's attributes.
    fn create(node: &Node) -> Result<Self, String>;

    /// Computes one pass.
    fn compute(&self, pass: &Pass<'_>) -> Result<(), String>;
}

/// The functions of an operator, as the library calls them.
#[repr(transparent)]
pub struct Table(OrtCustomOp);

// SAFETY: a table is functions and numbers, and is never written to.
unsafe impl Sync for Table {}

impl std::fmt::Debug for Table {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Table")
    }
}

/// The table of an operator.
pub(crate) const fn table<O: Operator>() -> Table {
    Table(OrtCustomOp {
        version: VERSION,
        CreateKernel: None,
        GetName: Some(name::<O>),
        GetExecutionProviderType: Some(no_provider),
        GetInputType: Some(input_type::<O>),
        GetInputTypeCount: Some(input_count::<O>),
        GetOutputType: Some(output_type::<O>),
        GetOutputTypeCount: Some(output_count::<O>),
        KernelCompute: None,
        KernelDestroy: Some(destroy::<O>),
        GetInputCharacteristic: Some(input_kind::<O>),
        GetOutputCharacteristic: Some(output_kind::<O>),
        GetInputMemoryType: Some(memory_type),
        GetVariadicInputMinArity: Some(zero),
        GetVariadicInputHomogeneity: Some(zero),
        GetVariadicOutputMinArity: Some(zero),
        GetVariadicOutputHomogeneity: Some(zero),
        CreateKernelV2: Some(create::<O>),
        KernelComputeV2: Some(compute::<O>),
        InferOutputShapeFn: None,
        GetStartVersion: Some(first_version),
        GetEndVersion: Some(last_version),
    })
}

/// Adds `tables` to the options of a session, in the domain of this crate.
///
/// # Safety
/// Both pointers must be the library's own.
pub(crate) unsafe fn register(options: *mut OrtSessionOptions, base: *const OrtApiBase, tables: &'static [&'static Table]) -> OrtStatusPtr {
    // SAFETY: the library gives a base that lives as long as it does, and null where it does not know the version.
    let Some(api) = (unsafe { base.as_ref().and_then(|base| (base.GetApi)(VERSION).as_ref()) }) else {
        return OrtStatusPtr(ptr::null_mut());
    };
    let Ok(name) = CString::new(crate::DOMAIN) else {
        return status(api, "the domain's name is no C string");
    };
    let mut domain = ptr::null_mut();
    // SAFETY: names and tables are valid; those of the tables and the domain outlive every session, for neither is ever given back: sessions keep pointers to them.
    unsafe {
        let created = (api.CreateCustomOpDomain)(name.as_ptr(), &raw mut domain);
        if !created.0.is_null() {
            return created;
        }
        for table in tables {
            let added = (api.CustomOpDomain_Add)(domain, &raw const table.0);
            if !added.0.is_null() {
                return added;
            }
        }
        (api.AddCustomOpDomain)(options, domain)
    }
}

fn status(api: &OrtApi, message: &str) -> OrtStatusPtr {
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    // SAFETY: the message is a C string, which the library copies.
    unsafe { (api.CreateStatus)(OrtErrorCode::ORT_RUNTIME_EXCEPTION, message.as_ptr()) }
}

/// An operator for one node, and the library that calls it.
struct Kernel<O> {
    operator: O,
    api: &'static OrtApi,
}

/// A node that is being made ready.
pub(crate) struct Node {
    api: &'static OrtApi,
    info: *const OrtKernelInfo,
}

impl Node {
    /// An attribute that must be there.
    pub(crate) fn integer(&self, name: &CStr) -> Result<usize, String> {
        let mut value = 0_i64;
        // SAFETY: the pointers are valid for the call.
        let result = unsafe { (self.api.KernelInfoGetAttribute_int64)(self.info, name.as_ptr(), &raw mut value) };
        taken(self.api, result)?;
        usize::try_from(value).map_err(|_| format!("the attribute {} is {value}", name.to_string_lossy()))
    }

    /// How many inputs the node has.
    pub(crate) fn inputs(&self) -> Result<usize, String> {
        let mut count = 0;
        // SAFETY: the pointers are valid for the call.
        taken(self.api, unsafe { (self.api.KernelInfo_GetInputCount)(self.info, &raw mut count) })?;
        Ok(count)
    }

    /// An attribute that must be there.
    pub(crate) fn float(&self, name: &CStr) -> Result<f32, String> {
        let mut value = 0.0_f32;
        // SAFETY: the pointers are valid for the call.
        let result = unsafe { (self.api.KernelInfoGetAttribute_float)(self.info, name.as_ptr(), &raw mut value) };
        taken(self.api, result)?;
        Ok(value)
    }
}

impl Node {
    /// Input `index` where it is a constant, which lives at least as long as the node is being made ready; `None` where it is left out. `T` is as for [`Pass::input`].
    pub(crate) fn constant<T: Copy>(&self, index: usize) -> Result<Option<Tensor<'_, T>>, String> {
        let (mut is_constant, mut value) = (0, ptr::null());
        // SAFETY: the pointers are valid for the call.
        let result = unsafe { (self.api.KernelInfoGetConstantInput_tensor)(self.info, index, &raw mut is_constant, &raw mut value) };
        taken(self.api, result)?;
        if is_constant == 0 || value.is_null() {
            return Ok(None);
        }
        // SAFETY: the constant is the library's, and outlives the call that makes the node ready.
        unsafe { tensor(self.api, value) }.map(Some)
    }
}

/// The error in a status, which is freed.
fn taken(api: &OrtApi, status: OrtStatusPtr) -> Result<(), String> {
    if status.0.is_null() {
        return Ok(());
    }
    // SAFETY: the status is the library's, and is not used after it was freed; its message was copied before.
    unsafe {
        let message = CStr::from_ptr((api.GetErrorMessage)(status.0)).to_string_lossy().into_owned();
        (api.ReleaseStatus)(status.0);
        Err(message)
    }
}

/// The tensors of one pass over a node.
pub(crate) struct Pass<'a> {
    api: &'a OrtApi,
    context: *mut OrtKernelContext,
}

impl<'a> Pass<'a> {
    /// Input `index`; `None` where it was left out. `T` is the type that the operator's table tells of the input.
    pub(crate) fn input<T: Copy>(&self, index: usize) -> Result<Option<Tensor<'a, T>>, String> {
        let mut value = ptr::null();
        // SAFETY: the context is that of this call.
        taken(self.api, unsafe { (self.api.KernelContext_GetInput)(self.context, index, &raw mut value) })?;
        if value.is_null() {
            return Ok(None);
        }
        // SAFETY: it lives as long as the pass, and its type is the one that the table tells.
        unsafe { tensor(self.api, value) }.map(Some)
    }

    /// Input `index`, which must be there, as memory that an output may be, too.
    pub(crate) fn memory(&self, index: usize) -> Result<(Vec<usize>, Shared<f32>), String> {
        let mut value = ptr::null();
        // SAFETY: the context is that of this call.
        taken(self.api, unsafe { (self.api.KernelContext_GetInput)(self.context, index, &raw mut value) })?;
        if value.is_null() {
            return Err(format!("input {index} is missing"));
        }
        let dims = dims(self.api, value)?;
        let (start, length) = (data(self.api, value.cast_mut())?, dims.iter().product());
        Ok((dims, Shared { start, length }))
    }

    /// Input `index`, which must be there.
    pub(crate) fn needed<T: Copy>(&self, index: usize) -> Result<Tensor<'a, T>, String> {
        self.input(index)?.ok_or_else(|| format!("input {index} is missing"))
    }

    /// Output `index` of these sizes; `None` where nobody wants it.
    pub(crate) fn output(&self, index: usize, dims: &[usize]) -> Result<Option<Shared<f32>>, String> {
        let mut count = 0;
        // SAFETY: the context is that of this call.
        taken(self.api, unsafe { (self.api.KernelContext_GetOutputCount)(self.context, &raw mut count) })?;
        if index >= count {
            return Ok(None);
        }
        let sizes: Vec<i64> = dims.iter().map(|&size| size as i64).collect();
        let mut value = ptr::null_mut();
        // SAFETY: the sizes are as many as is said.
        let result = unsafe { (self.api.KernelContext_GetOutput)(self.context, index, sizes.as_ptr(), sizes.len(), &raw mut value) };
        taken(self.api, result)?;
        if value.is_null() {
            return Ok(None);
        }
        Ok(Some(Shared { start: data::<f32>(self.api, value)?, length: dims.iter().product() }))
    }

    /// Output `index` of these sizes, which somebody wants.
    pub(crate) fn wanted(&self, index: usize, dims: &[usize]) -> Result<Shared<f32>, String> {
        self.output(index, dims)?.ok_or_else(|| format!("output {index} is missing"))
    }

    /// Calls `unit` with each of `0..units` once, on the session's threads, and returns when all are done.
    pub(crate) fn parallel<F: Fn(usize) + Sync>(&self, units: usize, unit: F) -> Result<(), String> {
        struct Work<F> {
            unit: F,
            failed: AtomicBool,
        }
        unsafe extern "C" fn call<F: Fn(usize) + Sync>(work: *mut c_void, index: usize) {
            // SAFETY: it is the work below, which outlives the call that waits for all units.
            let work = unsafe { &*work.cast::<Work<F>>() };
            if catch_unwind(AssertUnwindSafe(|| (work.unit)(index))).is_err() {
                work.failed.store(true, Ordering::Relaxed);
            }
        }
        let work = Work { unit, failed: AtomicBool::new(false) };
        // SAFETY: the call returns when all units are done; until then `work` is here.
        let result =
            unsafe { (self.api.KernelContext_ParallelFor)(self.context, call::<F>, units, 0, (&raw const work).cast_mut().cast()) };
        taken(self.api, result)?;
        if work.failed.into_inner() { Err("a part of the work panicked".to_owned()) } else { Ok(()) }
    }
}

unsafe extern "system" fn name<O: Operator>(_: *const OrtCustomOp) -> *const std::ffi::c_char {
    O::NAME.as_ptr()
}

/// None: that of processors.
unsafe extern "system" fn no_provider(_: *const OrtCustomOp) -> *const std::ffi::c_char {
    ptr::null()
}

unsafe extern "system" fn input_count<O: Operator>(_: *const OrtCustomOp) -> usize {
    O::INPUTS.len()
}

unsafe extern "system" fn output_count<O: Operator>(_: *const OrtCustomOp) -> usize {
    O::OUTPUTS.len()
}

unsafe extern "system" fn input_type<O: Operator>(_: *const OrtCustomOp, index: usize) -> ONNXTensorElementDataType {
    O::INPUTS.get(index).unwrap_or(&FLOATS).element
}

unsafe extern "system" fn output_type<O: Operator>(_: *const OrtCustomOp, index: usize) -> ONNXTensorElementDataType {
    O::OUTPUTS.get(index).unwrap_or(&FLOATS).element
}

unsafe extern "system" fn input_kind<O: Operator>(_: *const OrtCustomOp, index: usize) -> OrtCustomOpInputOutputCharacteristic {
    kind(O::INPUTS, index)
}

unsafe extern "system" fn output_kind<O: Operator>(_: *const OrtCustomOp, index: usize) -> OrtCustomOpInputOutputCharacteristic {
    kind(O::OUTPUTS, index)
}

fn kind(slots: &[Slot], index: usize) -> OrtCustomOpInputOutputCharacteristic {
    match slots.get(index) {
        Some(slot) if slot.optional => OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_OPTIONAL,
        _ => OrtCustomOpInputOutputCharacteristic::INPUT_OUTPUT_REQUIRED,
    }
}

unsafe extern "system" fn memory_type(_: *const OrtCustomOp, _: usize) -> OrtMemType {
    OrtMemType::OrtMemTypeDefault
}

unsafe extern "system" fn zero(_: *const OrtCustomOp) -> c_int {
    0
}

unsafe extern "system" fn first_version(_: *const OrtCustomOp) -> c_int {
    1
}

unsafe extern "system" fn last_version(_: *const OrtCustomOp) -> c_int {
    c_int::MAX
}

unsafe extern "system" fn create<O: Operator>(
    _: *const OrtCustomOp,
    api: *const OrtApi,
    info: *const OrtKernelInfo,
    kernel: *mut *mut c_void,
) -> OrtStatusPtr {
    // SAFETY: the library's functions live as long as it does.
    let api: &'static OrtApi = unsafe { &*api };
    match catch_unwind(AssertUnwindSafe(|| O::create(&Node { api, info }))) {
        Ok(Ok(operator)) => {
            // SAFETY: the library gives a place for one pointer.
            unsafe { *kernel = Box::into_raw(Box::new(Kernel { operator, api })).cast() };
            OrtStatusPtr(ptr::null_mut())
        }
        Ok(Err(message)) => status(api, &format!("{}: {message}", O::NAME.to_string_lossy())),
        Err(_) => status(api, &format!("{}: reading its node panicked", O::NAME.to_string_lossy())),
    }
}

unsafe extern "system" fn compute<O: Operator>(kernel: *mut c_void, context: *mut OrtKernelContext) -> OrtStatusPtr {
    // SAFETY: it is what `create` made; passes read it, and only `destroy` takes it away.
    let kernel = unsafe { &*kernel.cast::<Kernel<O>>() };
    let pass = Pass { api: kernel.api, context };
    match catch_unwind(AssertUnwindSafe(|| kernel.operator.compute(&pass))) {
        Ok(Ok(())) => OrtStatusPtr(ptr::null_mut()),
        Ok(Err(message)) => status(kernel.api, &format!("{}: {message}", O::NAME.to_string_lossy())),
        Err(_) => status(kernel.api, &format!("{}: it panicked", O::NAME.to_string_lossy())),
    }
}

unsafe extern "system" fn destroy<O: Operator>(kernel: *mut c_void) {
    // SAFETY: it is what `create` made, and the library is done with it.
    drop(unsafe { Box::from_raw(kernel.cast::<Kernel<O>>()) });
}
