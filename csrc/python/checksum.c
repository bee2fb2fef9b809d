/*
 * crc32c(): the checksum of a tensor's or a buffer's bytes.
 */
#include "python/module.h"

PyObject *fsdp_module_crc32c(PyObject *Py_UNUSED(module), PyObject *args,
                             PyObject *kwargs) {
  static const char *const keywords[] = {"data", "value", NULL};
  fsdp_error error = {0};
  PyObject *object; /* borrowed; the arguments keep it */
  unsigned long long value = 0;
  PyObject *value_object = NULL; /* borrowed */
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:crc32c",
                                   FSDP_KEYWORDS(keywords), &object,
                                   &value_object)) {
    return NULL;
  }
  if (value_object != NULL) {
    value = PyLong_AsUnsignedLongLong(value_object);
    if (PyErr_Occurred()) return NULL;
    if (value > UINT32_MAX) {
      return PyErr_Format(PyExc_OverflowError,
                          "value is %llu, a checksum has 32 bits", value);
    }
  }

  Py_buffer buffer = {.obj = NULL};
  const void *data = NULL;
  int64_t nbytes = 0;
  uint32_t checksum;
  if (fsdp_torch_is_tensor(object)) {
    if (fsdp_torch_host_bytes(object, &data, &nbytes, &error) != FSDP_OK) {
      fsdp_torch_set_python_error(&error);
      return NULL;
    }
  } else {
    if (PyObject_GetBuffer(object, &buffer, PyBUF_SIMPLE) < 0) return NULL;
    data = buffer.buf;
    nbytes = buffer.len;
  }
  Py_BEGIN_ALLOW_THREADS;
  checksum = fsdp_crc32c((uint32_t)value, data, (size_t)nbytes);
  Py_END_ALLOW_THREADS;
  PyBuffer_Release(&buffer); /* does nothing without an object */
  return PyLong_FromUnsignedLong(checksum);
}
