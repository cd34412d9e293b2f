import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { describeError } from "../api/client";
import { copyModel, refreshModels, shortName } from "../api/manage";
import { Button } from "../ui/Button";
import { Dialog, DialogForm } from "../ui/Dialog";
import { Field } from "../ui/Field";

/** Asks for a second name of a model. The file is not copied: both names share it. */
export function CopyDialog({ name, onClose }: { name: string; onClose: () => void }) {
  const queries = useQueryClient();
  const [target, setTarget] = useState(`${shortName(name)}-copy`);
  const copy = useMutation({
    mutationFn: () => copyModel(name, target.trim()),
    onSuccess: async () => {
      await refreshModels(queries);
      onClose();
    },
  });
  return (
    <Dialog open title={`Copy ${shortName(name)}`} onClose={onClose}>
      <DialogForm onSubmit={copy.mutate}>
        <Field
          label="Name of the copy"
          hint="Both names share one file, so the copy needs no space."
          error={copy.error ? describeError(copy.error) : null}
        >
          {(ids) => (
            <input {...ids} value={target} onChange={(event) => setTarget(event.target.value)} spellCheck={false} />
          )}
        </Field>
        <Button kind="primary" type="submit" disabled={!target.trim() || copy.isPending}>
          Copy
        </Button>
      </DialogForm>
    </Dialog>
  );
}
