//! What a tensor is, read from torch's C structure of it (DLPack's C exchange API, which torch 2.11 and 2.15 have) in one call: from Python
//! each of dtype, device, shape and strides costs a tenth of a microsecond, for every gradient of every step.

use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use std::ffi::{CStr, c_int, c_void};

/// Compares tensors with an example: device, dtype, shape and strides.
#[pyclass(frozen, module = "penstock._core")]
pub(crate) struct TensorCheck {
    /// The type whose objects the function takes.
    kind: Py<PyAny>,
    read: Read,
    device: Device,
    dtype: Dtype,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

#[pymethods]
impl TensorCheck {
    /// ValueError: the example's type has no such interface, or it cannot describe the example.
    #[new]
    fn new(example: &Bound<'_, PyAny>) -> PyResult<TensorCheck> {
        let kind = example.get_type().into_any();
        let read = reader(&kind)?;
        let tensor = describe(read, example).ok_or_else(|| PyValueError::new_err("DLPack cannot describe it"))?;
        // SAFETY: `example` lives until this function returns, and nothing changes it meanwhile.
        let (shape, strides) = unsafe { (tensor.of(tensor.shape).to_vec(), tensor.of(tensor.strides).to_vec()) };
        Ok(TensorCheck { kind: kind.unbind(), read, device: tensor.device, dtype: tensor.dtype, shape, strides })
    }

    /// The address of a tensor's first element if it is as the example; None otherwise. Where a stride has no meaning (there is one
    /// element, or none) it may be another.
    pub(crate) fn address(&self, tensor: &Bound<'_, PyAny>) -> Option<usize> {
        if !tensor.get_type().is(&self.kind) {
            return None;
        }
        let found = describe(self.read, tensor)?;
        // SAFETY: `tensor` lives until this function returns, and nothing changes it meanwhile.
        let (shape, strides) = unsafe { (found.of(found.shape), found.of(found.strides)) };
        let lies_alike = || {
            let mut dims = shape.iter().zip(strides.iter().zip(&self.strides));
            dims.all(|(size, (theirs, ours))| *size == 1 || theirs == ours)
        };
        let is_alike = found.device == self.device
            && found.dtype == self.dtype
            && shape == self.shape
            && (shape.contains(&0) || lies_alike());
        is_alike.then(|| found.data as usize + found.byte_offset as usize)
    }
}

/// The index of the first gradient that is not its parameter's any more, or that was changed in place; None if there is none.
/// `gradients` and `versions` are by index: what was handed over, and its version then; a negative version says nothing.
#[pyfunction]
pub(crate) fn first_changed(
    parameters: &Bound<'_, PyList>,
    gradients: &Bound<'_, PyDict>,
    versions: &Bound<'_, PyDict>,
) -> PyResult<Option<usize>> {
    let py = parameters.py();
    for (index, version) in versions {
        let at: usize = index.extract()?;
        let gradient = gradients.get_item(index)?.ok_or_else(|| PyIndexError::new_err(at))?;
        let version: i64 = version.extract()?;
        let is_same = version < 0 || gradient.getattr(intern!(py, "_version"))?.extract::<i64>()? == version;
        if !is_same || !parameters.get_item(at)?.getattr(intern!(py, "grad"))?.is(&gradient) {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// The function that describes objects of a type, without a reference of its own.
fn reader(kind: &Bound<'_, PyAny>) -> PyResult<Read> {
    let capsule = kind.getattr("__dlpack_c_exchange_api__")?;
    // SAFETY: the name is checked; the capsule of a type is never freed.
    let api = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()) }.cast::<ExchangeApi>();
    if api.is_null() {
        return Err(PyErr::fetch(kind.py()));
    }
    // SAFETY: DLPack's header says what lies there, for this major version.
    let api = unsafe { &*api };
    let read = api.dltensor_from_py_object_no_sync.filter(|_| api.version.major == 1);
    read.ok_or_else(|| PyValueError::new_err(format!("version {} of DLPack's C exchange API", api.version.major)))
}

/// What a tensor is; None if DLPack cannot tell (it is sparse, for one).
fn describe(read: Read, tensor: &Bound<'_, PyAny>) -> Option<Tensor> {
    let mut found = std::mem::MaybeUninit::<Tensor>::uninit();
    // SAFETY: `read` is of the object's type, the GIL is held, and the structure is DLPack's.
    if unsafe { read(tensor.as_ptr().cast(), found.as_mut_ptr()) } == 0 {
        // SAFETY: it was filled in.
        return Some(unsafe { found.assume_init() });
    }
    drop(PyErr::take(tensor.py()));
    None
}

const NAME: &CStr = c"dlpack_exchange_api";

// ------------------------------------------------------------------ DLPack's structures, version 1 (dlpack.h)

type Read = unsafe extern "C" fn(*mut c_void, *mut Tensor) -> c_int;

#[repr(C)]
struct Version {
    major: u32,
    minor: u32,
}

#[repr(C)]
struct ExchangeApi {
    version: Version,
    previous: *mut c_void,
    managed_tensor_allocator: *mut c_void,
    managed_tensor_from_py_object_no_sync: *mut c_void,
    managed_tensor_to_py_object_no_sync: *mut c_void,
    dltensor_from_py_object_no_sync: Option<Read>,
    current_work_stream: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
struct Dtype {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    dims: i32,
    dtype: Dtype,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

impl Tensor {
    /// One of its two lists of numbers.
    ///
    /// # Safety
    /// The object that it describes lives, and is not changed.
    unsafe fn of(&self, list: *const i64) -> &[i64] {
        if self.dims == 0 {
            return &[]; // there are no lists
        }
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(list, self.dims as usize) }
    }
}
